"""Before spending: which (S, kappa), which machines, what they cost and how long the learner would wait.

Invariant: pure; an answer keeps 2 ≤ kappa ≤ S − 1 and never rents what is not on offer, and where there is none the
``Infeasible`` error holds the relation that fails (``provisioning.ways_out`` says what to change).

Three questions can be asked of a market: what keeps the learner saturated (``Rent``), the shortest step for a budget
(``Afford``), and what a given pool does (``Use``). kappa may be given, left at S − 1, or ``auto``: every kappa that
lets a publish arrive before the next one begins (T_bcast ≤ kappa·T_train) is tried, and the best answer wins, ties by
the smaller kappa, whose trajectories are fresher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from echo2.provisioning import selection
from echo2.provisioning.capacity import RELATIVE_TOLERANCE, SECONDS_PER_H, Infeasible
from echo2.provisioning.demand import (
    SMALLEST_PUBLISH_PERIOD,
    Cadence,
    Demand,
    bubble_ratio,
    check_arrives,
    check_cadence,
    overlapped_rate,
    paper_rate,
    step_period_s,
)
from echo2.provisioning.offers import Offer, Terms, effective_costs
from echo2.provisioning.question import Afford, Ask, Market, Policy, Question, Rent, Use
from echo2.provisioning.selection import Pick, Selection


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""

    demand: Demand
    cadence: Cadence
    mu_min_per_s: float | None
    """Required by (2); None where (2) has no answer."""
    mu_min_overlapped_per_s: float | None
    """Required by (2′)."""
    picks: tuple[Pick, ...]
    """Empty for a pool of which the rate alone is known."""
    mu_selected_per_s: float
    step_s: float
    """Predicted mean time from step to step."""
    bubble_ratio: float
    """Predicted share of the learner's time spent waiting."""

    @property
    def required_per_s(self) -> float | None:
        """By the demand's rule."""
        return self.mu_min_per_s if self.demand.rule == "paper" else self.mu_min_overlapped_per_s

    @property
    def mu_target_per_s(self) -> float | None:
        return None if self.required_per_s is None else self.demand.gamma * self.required_per_s

    @property
    def is_enough(self) -> bool:
        """Whether the machines deliver what the rule requires, before the safety factor."""
        return self.required_per_s is not None and self.mu_selected_per_s >= self.required_per_s * (
            1 - RELATIVE_TOLERANCE
        )

    @property
    def workers_usd_per_h(self) -> float:
        """Traffic included."""
        return math.fsum(pick.usd_per_h for pick in self.picks)

    @property
    def estimated(self) -> bool:
        """Whether any of it rests on a throughput that nobody measured."""
        return any(pick.offer.estimated for pick in self.picks)

    def usd_per_step(self, learner_usd_per_h: float) -> float:
        return (self.workers_usd_per_h + learner_usd_per_h) * self.step_s / SECONDS_PER_H


def answer(ask: Ask, market: Market, question: Question) -> Plan:
    """The best answer. Raises Infeasible when there is none."""
    match question:
        case Rent(policy):
            known: dict[tuple[float, Terms], Selection] = {}
            return _best(
                ask,
                lambda cadence: _rented(ask.demand, cadence, market, policy, known),
                lambda plan: plan.workers_usd_per_h,
            )
        case Afford(budget):
            return _best(ask, lambda cadence: _afforded(ask.demand, cadence, market, budget), lambda plan: plan.step_s)
        case Use():
            plan = min(
                survey(ask, market, question),
                key=lambda plan: (not plan.is_enough, _rounded(plan.bubble_ratio), plan.cadence),
            )
            _check_enough(plan)
            return plan


def survey(ask: Ask, market: Market, question: Use) -> list[Plan]:
    """What the pool does at every cadence that could be asked for, enough or not. Raises Infeasible when at none."""
    plans: list[Plan] = []
    refused: list[Infeasible] = []
    for cadence in ask.cadences():
        try:
            plans.append(_used(ask.demand, cadence, market, question))
        except Infeasible as error:
            refused.append(error)
    if not plans:
        raise refused[-1]
    return plans


def _best(ask: Ask, solve: Callable[[Cadence], Plan], value: Callable[[Plan], float]) -> Plan:
    """The plan of least value, the smaller kappa among equal ones."""
    best: Plan | None = None
    refused: list[tuple[Cadence, Infeasible]] = []
    for cadence in ask.cadences():
        try:
            if ask.publish_period == "auto":
                check_arrives(ask.demand.times, cadence)
            plan = solve(cadence)
        except Infeasible as error:
            refused.append((cadence, error))
            continue
        if best is None or value(plan) < value(best) * (1 - RELATIVE_TOLERANCE):
            best = plan
    if best is None:
        # where a pool could do, too few machines are the reason; else the last kappa's relation stands for all
        answerable = [error for cadence, error in refused if _required(ask.demand, cadence) is not None]
        raise answerable[0] if answerable else refused[-1][1]
    return best


def _rented(
    demand: Demand, cadence: Cadence, market: Market, policy: Policy, known: dict[tuple[float, Terms], Selection]
) -> Plan:
    target = demand.target_per_s(cadence)
    terms = market.terms(demand.times.t_train_s, cadence.publish_period)
    if (target, terms) not in known:
        known[target, terms] = _CHOICES[policy](market.offers, target, terms)
    chosen = known[target, terms]
    return _plan(demand, cadence, chosen.picks, chosen.mu_per_s)


def _afforded(demand: Demand, cadence: Cadence, market: Market, budget_usd_per_h: float) -> Plan:
    """The cheapest saturated pool where the budget reaches that far, else the largest pool that it buys."""
    check_cadence(cadence)
    try:
        saturated = _rented(demand, cadence, market, "cheapest", {})
    except Infeasible:
        saturated = None
    if saturated is not None and saturated.workers_usd_per_h <= budget_usd_per_h * (1 + RELATIVE_TOLERANCE):
        return saturated
    terms = market.terms(demand.times.t_train_s, cadence.publish_period)
    chosen = selection.within_budget(market.offers, budget_usd_per_h, terms)
    return _plan(demand, cadence, chosen.picks, chosen.mu_per_s)


def _used(demand: Demand, cadence: Cadence, market: Market, question: Use) -> Plan:
    check_cadence(cadence)
    if question.mu_per_s is not None:
        return _plan(demand, cadence, (), question.mu_per_s)
    costs = effective_costs(market.offers, market.terms(demand.times.t_train_s, cadence.publish_period)).tolist()
    picks = tuple(
        Pick(offer, offer.count, offer.count * cost, offer.count * offer.expected_rollouts_per_s)
        for offer, cost in zip(market.offers, costs, strict=True)
    )
    return _plan(demand, cadence, picks, market.reach_per_s)


def _plan(demand: Demand, cadence: Cadence, picks: tuple[Pick, ...], mu_per_s: float) -> Plan:
    times = demand.times
    step_s = step_period_s(times, cadence, mu_per_s)
    check_arrives(msgspec.structs.replace(times, t_train_s=step_s), cadence)
    paper, overlapped = required_rates(demand, cadence)
    return Plan(
        demand=demand,
        cadence=cadence,
        mu_min_per_s=paper,
        mu_min_overlapped_per_s=overlapped,
        picks=picks,
        mu_selected_per_s=mu_per_s,
        step_s=step_s,
        bubble_ratio=bubble_ratio(times, cadence, mu_per_s),
    )


def required_rates(demand: Demand, cadence: Cadence) -> tuple[float | None, float | None]:
    """By (2) and by (2′), without gamma; None where no pool is enough or the cadence is not legal."""
    if not SMALLEST_PUBLISH_PERIOD <= cadence.publish_period < cadence.staleness_budget:
        return None, None
    times = demand.times
    return _known(lambda: paper_rate(times, cadence)), _known(lambda: overlapped_rate(times, cadence))


def _check_enough(plan: Plan) -> None:
    if plan.is_enough:
        return
    required = plan.demand.required_per_s(plan.cadence)  # raises where no pool is enough
    waits = f", with which the learner waits {plan.bubble_ratio:.1%} of the time" if plan.bubble_ratio > 0 else ""
    raise Infeasible(
        f"the pool must deliver {required:.6g} trajectories/s, got {plan.mu_selected_per_s:.6g}{waits}", "add workers"
    )


def _required(demand: Demand, cadence: Cadence) -> float | None:
    return _known(lambda: demand.required_per_s(cadence))


def _known(rate: Callable[[], float]) -> float | None:
    try:
        return rate()
    except Infeasible:
        return None


def _rounded(share: float) -> float:
    """Shares that differ by rounding only are equal."""
    return round(share, 9)


_CHOICES: dict[Policy, Callable[[Sequence[Offer], float, Terms], Selection]] = {
    "cheapest": selection.cheapest,
    "exact": selection.exact,
    "greedy": selection.greedy,
    "random": selection.random,
}
