"""Which machines to rent: the policies of equation (3), and the inverse question.

Invariant: a ``Selection`` reaches its target (or stays within its budget) to one part in 10⁹ and rents no more machines
of an offer than there are. The order of the offers never matters: they are put into one canonical order first, in which
values that differ only by rounding are equal and ties go to the larger machine, then to the name.

Equation (3) of the paper: choose A ⊆ W with the least Σ c_i such that Σ mu_i reaches the target gamma·mu_min. c_i is
``effective_usd_per_h``, mu_i ``expected_rollouts_per_s``, rho_i = c_i/mu_i.

- ``greedy``: the paper's rule, rising rho until the target is reached.
- ``cheapest``: the greedy, then a bounded search of departures from it (``provisioning.knapsack``).
- ``exact``: the optimum, by SciPy's HiGHS.
- ``random``: ECHO-2 without cost awareness (NoCost in Table 2): machines drawn at random until the target is reached.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

import msgspec
import numpy as np

from echo2.errors import UserError
from echo2.provisioning.capacity import Infeasible
from echo2.provisioning.integer_program import least_cover
from echo2.provisioning.knapsack import SLACK, Floats, cover, pack
from echo2.provisioning.offers import Offer, Terms, column, effective_costs

STANDARD_TERMS = Terms()
"""No traffic, long rentals: c_i is the price, as in the paper."""
EXACT_LIMIT_S = 60.0


class Pick(msgspec.Struct, frozen=True):
    """Machines of one offer."""

    offer: Offer
    machines: int
    usd_per_h: float
    """Of all of them, traffic included: machines · c_i."""
    mu_per_s: float
    """Of all of them: machines · mu_i."""


class Selection(msgspec.Struct, frozen=True):
    """What to rent, in order of rising rho."""

    picks: tuple[Pick, ...]

    @property
    def machines(self) -> int:
        return sum(pick.machines for pick in self.picks)

    @property
    def usd_per_h(self) -> float:
        """Traffic included."""
        return math.fsum(pick.usd_per_h for pick in self.picks)

    @property
    def mu_per_s(self) -> float:
        """Trajectories per second."""
        return math.fsum(pick.mu_per_s for pick in self.picks)

    @property
    def estimated(self) -> bool:
        """Whether any of it rests on a throughput that nobody measured."""
        return any(pick.offer.estimated for pick in self.picks)


def cheapest(offers: Sequence[Offer], mu_target_per_s: float, terms: Terms = STANDARD_TERMS) -> Selection:
    """Little cost for the target; never dearer than ``greedy``.

    Raises Infeasible when all machines together miss the target, UserError for a target that is no positive rate.
    """
    market = _Market(offers, terms)
    market.check_reach(mu_target_per_s)
    return market.selection(_covering(market, mu_target_per_s))


def greedy(offers: Sequence[Offer], mu_target_per_s: float, terms: Terms = STANDARD_TERMS) -> Selection:
    """The paper's rule alone, for comparison: whole offers of rising rho, then as many of the last as are needed.

    Raises as ``cheapest`` does.
    """
    market = _Market(offers, terms)
    market.check_reach(mu_target_per_s)
    units, missing = [0] * len(market.offers), 1.0
    rates, counts = (market.rates / mu_target_per_s).tolist(), market.counts.tolist()
    for index, (rate, count) in enumerate(zip(rates, counts, strict=True)):
        if missing <= SLACK:
            break
        units[index] = min(count, math.ceil(missing / rate - SLACK))
        missing -= units[index] * rate
    return market.selection(units)


def exact(
    offers: Sequence[Offer],
    mu_target_per_s: float,
    terms: Terms = STANDARD_TERMS,
    *,
    limit_s: float = EXACT_LIMIT_S,
) -> Selection:
    """The least cost for the target, proven: equation (3) as an integer program.

    Raises Infeasible as ``cheapest`` does, UserError when SciPy is not installed or ``limit_s`` passes without a proof.
    """
    market = _Market(offers, terms)
    market.check_reach(mu_target_per_s)
    known = market.selection(_covering(market, mu_target_per_s))
    costs, rates = market.costs / known.usd_per_h, market.rates / mu_target_per_s
    found = market.selection(least_cover(costs, rates, market.counts, limit_s))
    enough = found.mu_per_s >= mu_target_per_s * (1 - SLACK)
    return found if enough and found.usd_per_h < known.usd_per_h * (1 - SLACK) else known


def random(
    offers: Sequence[Offer], mu_target_per_s: float, terms: Terms = STANDARD_TERMS, *, seed: int = 0
) -> Selection:
    """NoCost: machines drawn one by one, each with equal chance, until the target is reached.

    Raises as ``cheapest`` does.
    """
    market = _Market(offers, terms)
    market.check_reach(mu_target_per_s)
    by_name = sorted(range(len(market.offers)), key=lambda index: market.offers[index].name)
    ends = list(accumulate(market.offers[index].count for index in by_name))
    units, mu_per_s, draws = [0] * len(by_name), 0.0, _shuffled(ends[-1], Random(seed))
    while mu_per_s < mu_target_per_s * (1 - SLACK):
        index = by_name[bisect_right(ends, next(draws))]
        units[index] += 1
        mu_per_s += float(market.rates[index])
    return market.selection(units)


def within_budget(offers: Sequence[Offer], budget_usd_per_h: float, terms: Terms = STANDARD_TERMS) -> Selection:
    """Much throughput for at most ``budget_usd_per_h``; never less than rising rho alone would give.

    Raises Infeasible when the budget rents no machine, UserError for a budget that is no positive sum.
    """
    market = _Market(offers, terms)
    _check_positive("the budget", budget_usd_per_h, "USD/h")
    least = float(market.costs.min())
    if budget_usd_per_h < least * (1 - SLACK):
        raise Infeasible(
            f"the budget must rent at least one machine, got {budget_usd_per_h:g} USD/h where the cheapest costs "
            f"{least:g} USD/h",
            f"raise it by {least - budget_usd_per_h:g} USD/h or find a cheaper offer",
        )
    costs, rates = market.costs / budget_usd_per_h, market.rates / market.rates.max()
    return market.selection(pack(costs, rates, market.counts))


def ranked(offers: Sequence[Offer], terms: Terms = STANDARD_TERMS) -> tuple[Offer, ...]:
    """The offers in the canonical order: rising rho, then the larger mu, then the name."""
    return _Market(offers, terms).offers


class _Market:
    """Offers in canonical order, as arrays."""

    def __init__(self, offers: Sequence[Offer], terms: Terms) -> None:
        if not offers:
            raise UserError("there must be at least one offer to choose from, got none")
        names = [offer.name for offer in offers]
        if len(set(names)) < len(names):
            doubled = next(name for name in sorted(names) if names.count(name) > 1)
            raise UserError(f"offers must have different names, got {doubled!r} more than once: rename one of them")
        own_costs = effective_costs(offers, terms)
        costs = _settled(own_costs)
        rates = _settled(column(offers, "rollouts_per_s") * column(offers, "reliability"))
        by_name = np.empty(len(names), np.int64)
        by_name[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
        order = np.lexsort((by_name, -rates, _settled(costs / rates)))
        self.costs: Floats = costs[order]
        self.rates: Floats = rates[order]
        self.offers = tuple([offers[index] for index in order.tolist()])
        self.counts = column(offers, "count").astype(np.int64)[order]
        self._own_costs = own_costs[order]

    def check_reach(self, mu_target_per_s: float) -> None:
        """Raises Infeasible when all machines together deliver less than the target."""
        _check_positive("the target", mu_target_per_s, "trajectories/s")
        reach = float(self.rates @ self.counts)
        if reach >= mu_target_per_s * (1 - SLACK):
            return
        missing, best = mu_target_per_s - reach, self.offers[0]
        raise Infeasible(
            f"offers must deliver {mu_target_per_s:g} trajectories/s together, got {reach:g} from "
            f"{self.counts.sum()} machines",
            f"{missing:g} trajectories/s are missing, which {math.ceil(missing / best.expected_rollouts_per_s)} more "
            f"machines like {best.name!r} would deliver",
        )

    def selection(self, units: Sequence[int]) -> Selection:
        """The machines that ``units`` counts, in canonical order."""
        picks: list[Pick] = []
        for index in np.flatnonzero(units).tolist():
            offer, count = self.offers[index], units[index]
            usd_per_h = count * float(self._own_costs[index])
            picks.append(Pick(offer, count, usd_per_h, count * offer.expected_rollouts_per_s))
        return Selection(tuple(picks))


def _settled(values: Floats) -> Floats:
    """``values`` with those that differ by rounding only made equal, to the smallest of them."""
    order = np.argsort(values)
    rising = values[order]
    begins = np.concatenate(([True], rising[1:] > rising[:-1] * (1 + SLACK)))
    settled = np.empty_like(values)
    settled[order] = rising[begins][np.cumsum(begins) - 1]
    return settled


def _covering(market: _Market, mu_target_per_s: float) -> list[int]:
    costs, rates = market.costs / market.costs.max(), market.rates / mu_target_per_s
    return cover(costs, rates, market.counts)


def _shuffled(size: int, draw: Random) -> Iterator[int]:
    """0 … size − 1 in random order, made as it is asked for (Fisher and Yates)."""
    moved: dict[int, int] = {}
    for place in range(size):
        other = draw.randrange(place, size)
        yield moved.get(other, other)
        moved[other] = moved.get(place, place)


def _check_positive(what: str, value: float, unit: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"{what} must be more than 0 {unit}, got {value:g}")
