"""What to change when no plan exists: S, kappa, T_bcast or workers, and to what value.

Invariant: pure, and every way that is told has been tried: the same question, changed so, has an answer. Workers are
added to a change of S, kappa or T_bcast only where neither is enough alone.

With w = gamma·R / (what all machines deliver), the time in which they fill a step, the two rules become

    overlapped   (S − kappa + 1)·T_train ≥ T_bcast + T_gen + w,  T_bcast ≤ kappa·T_train  and  T_train ≥ w
    paper        kappa·(T_train − w) ≥ T_bcast

which are solved for S, kappa and T_bcast below; where w > T_train only more machines help. A budget asks for no
saturation: there it must only hold that 2 ≤ kappa ≤ S − 1 and T_bcast ≤ kappa·T_train.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from echo2.errors import UserError
from echo2.provisioning.capacity import RELATIVE_TOLERANCE, Infeasible
from echo2.provisioning.demand import (
    LARGEST_STALENESS_BUDGET,
    SMALLEST_PUBLISH_PERIOD,
    SMALLEST_STALENESS_BUDGET,
    Cadence,
    Demand,
    Times,
    check_arrives,
)
from echo2.provisioning.offers import effective_costs
from echo2.provisioning.plan import answer
from echo2.provisioning.question import LARGEST_SURVEYED_BUDGET, Afford, Ask, Market, Question, Rent, Use
from echo2.provisioning.selection import ranked

DIGITS = 3
"""Of a T_bcast or a rate that is told; rounded to the safe side."""
MOST_MACHINES = 1_000_000


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that make the question answerable; None leaves things as they are."""

    staleness_budget: int | None = None
    publish_period: int | None = None
    t_bcast_s: float | None = None
    machines: int | None = None
    """More of ``offer`` than there are."""
    offer: str = ""
    mu_per_s: float | None = None
    """What the pool must deliver, where no offers are given."""
    more_usd_per_h: float | None = None
    """By which the budget must rise."""

    def __str__(self) -> str:
        values = (("S", self.staleness_budget), ("kappa", self.publish_period))
        cadence = " and ".join(f"{name} to {value}" for name, value in values if value is not None)
        parts = [f"set {cadence}"] if cadence else []
        if self.t_bcast_s is not None:
            parts.append(f"bring T_bcast down to {self.t_bcast_s:g} s")
        if self.machines is not None:
            parts.append(f"add {self.machines} worker{'s' * (self.machines > 1)} like {self.offer!r}")
        if self.mu_per_s is not None:
            parts.append(f"have workers for {self.mu_per_s:g} trajectories/s")
        if self.more_usd_per_h is not None:
            parts.append(f"raise the budget by {self.more_usd_per_h:g} USD/h")
        return " and ".join(parts)


def applied(way: Way, ask: Ask, market: Market, question: Question) -> tuple[Ask, Market, Question]:
    """The question after the change."""
    if way.staleness_budget is not None:
        ask = msgspec.structs.replace(ask, staleness_budget=way.staleness_budget)
    if way.publish_period is not None:
        ask = msgspec.structs.replace(ask, publish_period=way.publish_period)
    if way.t_bcast_s is not None:
        ask = ask.with_t_bcast(way.t_bcast_s)
    if way.machines is not None:
        offers = tuple(
            msgspec.structs.replace(offer, count=offer.count + way.machines) if offer.name == way.offer else offer
            for offer in market.offers
        )
        market = msgspec.structs.replace(market, offers=offers)
    if way.mu_per_s is not None:
        question = Use(way.mu_per_s)
    if way.more_usd_per_h is not None and isinstance(question, Afford):
        question = Afford(question.workers_usd_per_h + way.more_usd_per_h)
    return ask, market, question


def sentence(error: Infeasible, ways: Sequence[Way]) -> str:
    """What fails and every way out, for people."""
    return f"{error.broken}; {', or '.join(map(str, ways))}" if ways else str(error)


def ways_out(ask: Ask, market: Market, question: Question) -> tuple[Way, ...]:
    """The ways out of a question that has no answer."""
    search = _Search(ask, market, question)
    single = [way for way in search.single() if search.works(way)]
    return tuple(single or [way for way in search.joint() if search.works(way)][:1])


class _Search:
    def __init__(self, ask: Ask, market: Market, question: Question) -> None:
        self.ask, self.market, self.question = ask, market, question
        self.demand: Demand = ask.demand
        self.times: Times = ask.demand.times
        self.saturates = not isinstance(question, Afford)
        self.factor = ask.demand.gamma if isinstance(question, Rent) else 1.0
        """A pool that is there is judged without the safety factor."""
        self.reach_per_s = _reach(market, question)
        self.budget = ask.staleness_budget if ask.staleness_budget is not None else LARGEST_SURVEYED_BUDGET
        self.fill_s = self.factor * self.times.rollouts_per_step / self.reach_per_s
        """w."""

    def works(self, way: Way) -> bool:
        ask, market, question = applied(way, self.ask, self.market, self.question)
        try:
            answer(ask, market, Rent() if isinstance(question, Rent) else question)
        except UserError:
            return False
        return True

    def single(self) -> Iterator[Way]:
        yield from self._cadences(self.fill_s)
        yield from self._faster()
        yield from self._larger(self.ask, Way())

    def joint(self) -> Iterator[Way]:
        """A cadence that asks for little, and the machines for it."""
        t_train_s = self.times.t_train_s
        for way in self._cadences(t_train_s if self.demand.rule == "overlapped" else t_train_s / 2):
            yield from self._larger(applied(way, self.ask, self.market, self.question)[0], way)

    def _cadences(self, fill_s: float) -> Iterator[Way]:
        """Another kappa or S or both, for machines that fill a step in ``fill_s``."""
        t_train_s, late_s = self.times.t_train_s, self.times.t_bcast_s + self.times.t_gen_s
        if not self.saturates:
            least, distance = max(SMALLEST_PUBLISH_PERIOD, _up(self.times.t_bcast_s / t_train_s)), 1
        elif self.demand.rule == "overlapped":
            if fill_s > t_train_s * (1 + RELATIVE_TOLERANCE):
                return
            least = max(SMALLEST_PUBLISH_PERIOD, _up(self.times.t_bcast_s / t_train_s))
            distance = max(1, _up((late_s + fill_s) / t_train_s) - 1)
        else:
            if fill_s >= t_train_s * (1 - RELATIVE_TOLERANCE):
                return
            least = max(SMALLEST_PUBLISH_PERIOD, _up(self.times.t_bcast_s / (t_train_s - fill_s)))
            distance = 1
        given = self.ask.publish_period
        budget = max(self.budget, SMALLEST_STALENESS_BUDGET, least + distance)
        wished = given if isinstance(given, int) else budget - 1
        period = min(max(wished, least), budget - distance)
        pairs = [(budget, period)]
        if isinstance(given, int) and given >= least and period != given:
            pairs.append((max(self.budget, given + distance), given))
        for pair in pairs:
            if pair[0] <= LARGEST_STALENESS_BUDGET:
                yield self._cadence_way(*pair)

    def _cadence_way(self, budget: int, period: int) -> Way:
        """Names only what differs from what was given, S − 1 where nothing was."""
        given = self.ask.publish_period
        same = given == "auto" or period == (budget - 1 if given == "default" else given)
        return Way(
            staleness_budget=budget if budget != self.ask.staleness_budget else None,
            publish_period=None if same else period,
        )

    def _faster(self) -> Iterator[Way]:
        """A shorter T_bcast."""
        t_train_s = self.times.t_train_s
        longest_s = 0.0
        for budget, period in self.ask.cadences():
            if not self.saturates:
                longest_s = max(longest_s, period * t_train_s)
            elif self.demand.rule == "overlapped":
                window_s = (budget - period + 1) * t_train_s - self.times.t_gen_s - self.fill_s
                longest_s = max(longest_s, min(window_s, period * t_train_s) if self.fill_s <= t_train_s else 0.0)
            else:
                longest_s = max(longest_s, period * (t_train_s - self.fill_s))
        if (t_bcast_s := _rounded_down(min(longest_s, self.times.t_bcast_s))) > 0:
            yield Way(t_bcast_s=t_bcast_s)

    def _larger(self, ask: Ask, way: Way) -> Iterator[Way]:
        """``way`` and as many machines more as ``ask`` takes, or the budget for one."""
        if isinstance(self.question, Afford):
            yield from self._richer(ask, way, self.question.workers_usd_per_h)
            return
        rates = [rate for cadence in ask.cadences() if (rate := _required(ask, cadence)) is not None]
        if not rates:
            return
        target = self.factor * min(rates)
        if isinstance(self.question, Use) and self.question.mu_per_s is not None:
            yield msgspec.structs.replace(way, mu_per_s=-_rounded_down(-target))
            return
        best = ranked(self.market.offers)[0]
        machines = math.ceil((target - self.reach_per_s) / best.expected_rollouts_per_s)
        if best.count + machines <= MOST_MACHINES:
            yield msgspec.structs.replace(way, machines=max(1, machines), offer=best.name)

    def _richer(self, ask: Ask, way: Way, budget_usd_per_h: float) -> Iterator[Way]:
        periods = {cadence.publish_period for cadence in ask.cadences()}
        terms = [self.market.terms(self.times.t_train_s, period) for period in periods]
        least = min(float(effective_costs(self.market.offers, of_period).min()) for of_period in terms)
        if least > budget_usd_per_h:
            yield msgspec.structs.replace(way, more_usd_per_h=-_rounded_down(budget_usd_per_h - least))


def _reach(market: Market, question: Question) -> float:
    return question.mu_per_s if isinstance(question, Use) and question.mu_per_s is not None else market.reach_per_s


def _required(ask: Ask, cadence: Cadence) -> float | None:
    """By the rule; None where no pool is enough."""
    try:
        if ask.publish_period == "auto":
            check_arrives(ask.demand.times, cadence)
        return ask.demand.required_per_s(cadence)
    except UserError:
        return None


def _up(value: float) -> int:
    """The next whole number, not for the last bit of a double."""
    return math.ceil(value * (1 - RELATIVE_TOLERANCE))


def _rounded_down(value: float) -> float:
    """To ``DIGITS`` digits, towards minus infinity."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - DIGITS + 1)
    return float(f"{math.floor(value / unit * (1 + RELATIVE_TOLERANCE if value > 0 else 1)) * unit:.12g}")
