"""The two knapsacks of provisioning: the cheapest units that cover a target, the most rate within a budget.

Invariant: both are pure, examine at most ``ROUNDS`` · ``MAX_NODES`` partial choices and return a feasible one at least
as good as the paper's greedy (equation (3): rising cost per rate), which is the first they examine.

The search is depth first in the order of rising cost per rate, taking as many units as possible first, and drops a
branch when even fractions of units could not beat the best choice so far (Horowitz and Sahni, JACM 21(2), 1974;
Martello and Toth, *Knapsack Problems*, 1990). At every node it also tries to end with a single unit of whatever offer
suits best. Choices that beat the greedy differ from it around the offer at which it ends, so only the ``MAX_DEPTH``
offers before that one are reconsidered. What was found rules out most units by linear duality (``improving_range``),
and the next round searches among those that are left.

Quantities are dimensionless: the caller scales the target or the budget to 1. Offers come in the order of rising
cost/rate, as arrays of the same length.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Search = Callable[[Floats, Floats, Counts], list[int]]
"""(values, bounded, counts) → units of each offer."""

MAX_NODES = 1000
"""In a round, about 3 ms. A count and not a time, so that a busy machine gives the same answer."""
ROUNDS = 3
MAX_DEPTH = 200
SLACK = 1e-9
"""Relative: a sum may miss its bound by this much, and a choice must be better by this much to replace another."""


def cover(costs: Floats, rates: Floats, counts: Counts) -> list[int]:
    """How many units of each offer cover a total rate of 1 at small cost.

    The caller has checked that all units together reach 1.
    """
    return _by_rounds(_cover, costs, rates, counts)


def pack(costs: Floats, rates: Floats, counts: Counts) -> list[int]:
    """How many units of each offer give much rate at a total cost of at most 1."""
    return _by_rounds(_pack, -rates, costs, counts)


def improving_range(values: Floats, bounded: Floats, counts: Counts, known: float) -> tuple[Counts, Counts]:
    """The fewest and the most units of each offer in any choice whose value is below ``known``.

    ``values`` are costs where rates are bounded from below, negative rates where costs are bounded from above; offers
    come in rising order of values/bounded. By linear duality: with q = value/bounded of the offer at which the greedy
    ends and d = value − q·bounded of each offer, a choice n has at least the value

        q + Σ min(0, d)·count + Σ |d|·(units by which n differs from none where d > 0, from all where d < 0)

    and no term of the last sum can exceed what ``known`` leaves.
    """
    last = min(bisect_left(np.cumsum(bounded * counts), 1 - SLACK), len(counts) - 1)
    price = values[last] / bounded[last]
    reduced = values - price * bounded
    room = max(0.0, known - price - float(np.sum(np.minimum(reduced, 0.0) * counts))) + SLACK * abs(known)
    apart = np.floor(room / np.maximum(np.abs(reduced), room / counts.max()))
    least = np.where(reduced < 0, np.maximum(counts - apart, 0), 0)
    most = np.where(reduced > 0, np.minimum(counts, apart), counts)
    return least.astype(np.int64), most.astype(np.int64)


def _by_rounds(search: Search, values: Floats, bounded: Floats, counts: Counts) -> list[int]:
    units = np.array(search(values, bounded, counts))
    for _ in range(1, ROUNDS):
        known = float(values @ units)
        least, most = improving_range(values, bounded, counts, known)
        free = np.flatnonzero(most > least)
        amount = 1 - float(least @ bounded)
        if not len(free) or amount <= SLACK:
            break
        found = least.copy()
        found[free] += search(values[free], bounded[free] / amount, (most - least)[free])
        if values @ found >= known - SLACK * abs(known):
            break
        units = found
    return [int(number) for number in units.tolist()]


def _cover(costs: Floats, rates: Floats, counts: Counts) -> list[int]:
    counts = np.minimum(counts, np.ceil(1 / rates)).astype(np.int64)
    totals = _Totals(rates, costs, counts, all_must_fit=True)
    last = min(bisect_left(totals.sums, 1 - SLACK), len(costs)) - 1
    best = _Best(counts.tolist(), max(0, last - MAX_DEPTH))
    ending = _SingleUnit(np.argsort(rates)[::-1], rates, -costs)
    cost, rate, count = costs.tolist(), rates.tolist(), best.counts
    branches = [(best.first, 1 - totals.sums[best.first], totals.values[best.first], count[best.first])]
    for _ in range(MAX_NODES):
        if not branches:
            break
        at, missing, paid, units = branches.pop()
        best.chosen[at] = units
        left, now_paid = missing - units * rate[at], paid + units * cost[at]
        deeper = left > SLACK and at + 1 < len(cost)
        if left <= SLACK:
            best.consider(-now_paid, at)
        elif deeper and -now_paid - totals.value_of(at + 1, left) <= best.least_gain:
            continue  # with fewer units of this offer the bound is no better
        elif (single := ending.with_at_least(left)) >= 0:
            best.consider(-now_paid - cost[single], at, single)
        if units:
            branches.append((at, missing, paid, units - 1))
        if deeper:
            branches.append((at + 1, left, now_paid, min(count[at + 1], math.ceil(left / rate[at + 1] - SLACK))))
    return best.units


def _pack(values: Floats, costs: Floats, counts: Counts) -> list[int]:
    rates = -values
    counts = np.minimum(counts, np.floor(1 / costs + SLACK)).astype(np.int64)
    totals = _Totals(costs, rates, counts, all_must_fit=False)
    last = min(bisect_right(totals.sums, 1 + SLACK), len(costs)) - 1
    best = _Best(counts.tolist(), max(0, last - MAX_DEPTH))
    ending = _SingleUnit(np.argsort(costs), costs, rates)
    cost, rate, count = costs.tolist(), rates.tolist(), best.counts

    def affordable(at: int, budget: float) -> int:
        return int(min(count[at], math.floor(budget / cost[at] + SLACK)))

    budget = max(0.0, 1 - totals.sums[best.first])
    branches = [(best.first, budget, totals.values[best.first], affordable(best.first, budget))]
    for _ in range(MAX_NODES):
        if not branches:
            break
        at, budget, gained, units = branches.pop()
        best.chosen[at] = units
        left, now_gained = max(0.0, budget - units * cost[at]), gained + units * rate[at]
        best.consider(now_gained, at)
        if at + 1 < len(cost) and now_gained + totals.value_of(at + 1, left) <= best.least_gain:
            continue  # with fewer units of this offer the bound is no better
        if (single := ending.with_at_most(left)) >= 0:
            best.consider(now_gained + rate[single], at, single)
        if units:
            branches.append((at, budget, gained, units - 1))
        if at + 1 < len(cost) and single >= 0:
            branches.append((at + 1, left, now_gained, affordable(at + 1, left)))
    return best.units


class _Totals:
    """Sums over all units of the first k offers: what is bounded (``sums``) and what it brings (``values``)."""

    def __init__(self, bounded: Floats, valued: Floats, counts: Counts, *, all_must_fit: bool) -> None:
        self.sums: list[float] = np.concatenate(([0.0], np.cumsum(bounded * counts))).tolist()
        self.values: list[float] = np.concatenate(([0.0], np.cumsum(valued * counts))).tolist()
        self._value_of_one: list[float] = (valued / bounded).tolist()
        self._all_must_fit = all_must_fit

    def value_of(self, start: int, amount: float) -> float:
        """The value of ``amount`` in fractions of units from the offer ``start`` on, best ones first.

        Where the units end before the amount: that of all units, or infinite where all of the amount must fit.
        """
        end = bisect_left(self.sums, self.sums[start] + amount - SLACK, start + 1)
        if end == len(self.sums):
            return math.inf if self._all_must_fit else self.values[-1] - self.values[start]
        part = amount - (self.sums[end - 1] - self.sums[start])
        return self.values[end - 1] - self.values[start] + part * self._value_of_one[end - 1]


class _Best:
    """The best choice so far; gains are to be large (a cost is a negative gain)."""

    def __init__(self, counts: list[int], first: int) -> None:
        self.counts = counts
        self.first = first
        """Offers before this one are taken whole."""
        self.chosen = [*counts[:first], *[0] * (len(counts) - first)]
        """Of the branch being examined; stale beyond its last offer."""
        self._kept: list[int] = []
        self._extra = -1
        self.least_gain = -math.inf
        """What a choice must exceed to replace the best."""

    def consider(self, gain: float, last: int, extra: int = -1) -> None:
        """``chosen`` up to the offer ``last``, and one more unit of ``extra``."""
        if gain <= self.least_gain:
            return
        if extra >= 0 and (self.chosen[extra] if extra <= last else 0) >= self.counts[extra]:
            return
        self._kept, self._extra = self.chosen[self.first : last + 1], extra
        self.least_gain = gain + abs(gain) * SLACK

    @property
    def units(self) -> list[int]:
        """The best choice."""
        units = [*self.counts[: self.first], *self._kept]
        units += [0] * (len(self.counts) - len(units))
        if self._extra >= 0:
            units[self._extra] += 1
        return units


class _SingleUnit:
    """The single unit that suits best among those within a bound; its index, -1 where there is none."""

    def __init__(self, order: npt.NDArray[np.intp], bounded: Floats, gains: Floats) -> None:
        """``order``: offers by ``bounded``, those first that are within every bound."""
        best_first = np.argsort(-gains, kind="stable")
        place = np.empty(len(order), np.int64)
        place[best_first] = np.arange(len(order))
        best = best_first[np.minimum.accumulate(place[order])]
        self._best: list[int] = [-1, *best.tolist()]
        self._bounds: list[float] = np.sort(bounded).tolist()

    def with_at_least(self, amount: float) -> int:
        """For an order that falls."""
        return self._best[len(self._bounds) - bisect_left(self._bounds, amount - SLACK)]

    def with_at_most(self, amount: float) -> int:
        """For an order that rises."""
        return self._best[bisect_right(self._bounds, amount + SLACK)]
