"""How fast a worker delivers, and how sure that is, from what reached the buffer alone.

Invariant: an estimate is a pure function of the deliveries, of the time the worker could work in and of what its offer
says; nothing that the worker claims enters it. It is never 0 for a worker that delivered, and never negative.

mu_i counts rewarded trajectories that reached the buffer, so it includes generation, scoring, network and stragglers
(paper §3). Deliveries are few (a group every ten minutes is a healthy worker) and come in bursts (lanes finish
together). So they are counted as a Gamma-Poisson process:

    mu ~ Gamma(shape a + k/phi, rate a/mu_0 + T/phi)       in units of deliveries

a and mu_0 are the prior, the offer's own rate at the weight of ``PRIOR_DELIVERIES``; k deliveries came in the working
time T, which runs to the present: silence counts as it passes and not only once it ends. phi is the dispersion: 1 where
deliveries come at random, 1/2 where they are regular, about m where they come in bursts of m. It makes the bounds wider
and leaves the mean alone.

- T leaves out what the coordinator held the worker back: lease gate, and everything before its first lease. Otherwise
  a pool larger than the demand would look exactly as large as the demand, and nothing could ever be released.
- A change is looked for: where the deliveries since some delivery tell of another rate than those before it (a
  likelihood ratio, and longer than the longest pause before), those since count alone, and all before weighs as much as
  two deliveries; as far as the change is likely. A steady worker has a long memory, a changed one a short one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import msgspec

WINDOW = 64
"""Deliveries remembered: the relative error of a rate over n deliveries falls as 1/sqrt(n)."""
PRIOR_DELIVERIES = 2.0
"""Weight of the rate an offer states: a worker that stays silent for two expected gaps is believed half of it."""
ESTIMATED_DELIVERIES = 1.0
"""The same for a rate that was computed and that nobody measured."""
_CHANGE = 3.0
"""Log-likelihood ratio at which a change is as likely as none: 1 in 70 by chance, where deliveries come at random. A
worker that stops shows after four or five of the deliveries it would have made, one that falls to a third after ten."""
_DOUBT = 2.5
"""A ratio so much below it (odds of 1 in 12) is no change."""
_BURST = 0.1
"""Deliveries that follow each other within so much of the mean gap belong together."""
_BEFORE_DELIVERIES = 2.0
"""Weight of all that was before a change."""
_LEAST_PER_S = 1e-9
"""What an offer states below this is nothing, as in price lists."""
_DISPERSION_WEIGHT = 2.0
"""Gaps at the weight of which deliveries count as random (phi = 1) until they show what they are."""


class Estimate(msgspec.Struct, frozen=True):
    """A rate with its uncertainty, as a gamma distribution; of one worker or of a pool."""

    mean_per_s: float = 0.0
    """Trajectories per second."""
    variance: float = 0.0
    """(trajectories/s)²."""

    @property
    def deliveries(self) -> float:
        """How many deliveries (those of its prior too) a rate so sure rests on; infinite where it is exact."""
        if self.variance <= 0:
            return math.inf if self.mean_per_s > 0 else 0.0
        return self.mean_per_s**2 / self.variance

    def lower_per_s(self, deviations: float = 1.0) -> float:
        """What the rate exceeds at so many standard deviations' confidence (1: 84 %, 2: 98 %)."""
        return min(self.mean_per_s, self._quantile(-deviations))

    def upper_per_s(self, deviations: float = 1.0) -> float:
        """What the rate stays below at so many standard deviations' confidence."""
        return max(self.mean_per_s, self._quantile(deviations))

    def _quantile(self, deviations: float) -> float:
        """Wilson and Hilferty (1931): the cube root of a gamma variable is close to normal."""
        if self.mean_per_s <= 0 or self.variance <= 0:
            return self.mean_per_s
        ninth = self.variance / (9 * self.mean_per_s**2)
        return float(self.mean_per_s * max(0.0, 1 - ninth + deviations * math.sqrt(ninth)) ** 3)


def stated(rate_per_s: float, deliveries: float = PRIOR_DELIVERIES) -> Estimate:
    """A rate that somebody states, worth so many deliveries."""
    return Estimate(rate_per_s, rate_per_s**2 / deliveries)


def pooled(estimates: Iterable[Estimate]) -> Estimate:
    """Of independent workers together, whatever their order."""
    found = list(estimates)
    return Estimate(math.fsum(e.mean_per_s for e in found), math.fsum(e.variance for e in found))


class DeliveryRate(msgspec.Struct, frozen=True, kw_only=True):
    """mu_i of one worker. An immutable value: a replay of the same observations gives the same estimate.

    Example: ``DeliveryRate(opened_s=0.0).delivered(4.0, 8).rate_per_s(4.0) == 2.0``.
    """

    opened_s: float | None = None
    """When the window opened, on the worker's working clock (monotonic time minus time held); None before it was given
    work for the first time."""
    held_s: float = 0.0
    """All time held so far."""
    deliveries: tuple[tuple[float, int], ...] = ()
    """(working time, trajectories) of the last ``WINDOW`` deliveries, oldest first."""
    prior_per_s: float = 0.0
    """What the worker's offer says, trajectories per second; 0 where nobody said anything."""
    prior_deliveries: float = PRIOR_DELIVERIES
    rows_per_delivery: float = 1.0
    """Trajectories of a group; what one is expected to bring until the first came."""
    lead_s: float = 0.0
    """Time that the first group takes at least: so long, silence says nothing."""

    def given_work(self, now_s: float) -> DeliveryRate:
        """A lease was granted: from the first one on, time counts."""
        return self if self.opened_s is not None else msgspec.structs.replace(self, opened_s=now_s - self.held_s)

    def delivered(self, now_s: float, rows: int) -> DeliveryRate:
        """``rows`` rewarded trajectories arrived at ``now_s``."""
        opened = self.given_work(now_s)
        deliveries = (*opened.deliveries, (now_s - self.held_s, rows))
        if len(deliveries) <= WINDOW:
            return msgspec.structs.replace(opened, deliveries=deliveries)
        return msgspec.structs.replace(opened, opened_s=deliveries[0][0], deliveries=deliveries[1:])

    def held(self, seconds: float) -> DeliveryRate:
        """The worker was denied work for ``seconds``, times the share of its lease loops that waited."""
        return msgspec.structs.replace(self, held_s=self.held_s + max(0.0, seconds))

    def rate_per_s(self, now_s: float) -> float:
        """Mean of ``estimate``: trajectories per second of working time."""
        return self.estimate(now_s).mean_per_s

    def estimate(self, now_s: float) -> Estimate:
        """As of ``now_s``. Falls while nothing arrives; nothing at all without a prior and a delivery."""
        if self.opened_s is None:
            return self._before(0.0)
        if not self.deliveries:
            return self._before(max(0.0, now_s - self.held_s - self.opened_s - self.lead_s))
        times = [self.opened_s, *(at for at, _ in self.deliveries)]
        rows = list(accumulate((rows for _, rows in self.deliveries), initial=0))
        now_working_s = max(now_s - self.held_s, times[-1])
        per_row = len(self.deliveries) / (rows[-1] * _dispersion(times)) if rows[-1] else 1.0
        window = _Window(times, rows, now_working_s, per_row)
        return window.estimate(0, self.prior_deliveries, self.prior_per_s)

    def _before(self, silent_s: float) -> Estimate:
        """While nothing came."""
        return _posterior(self.prior_deliveries, self.prior_per_s, 0, silent_s, 1 / self.rows_per_delivery)


def _posterior(weight: float, before_per_s: float, rows: float, seconds: float, per_row: float) -> Estimate:
    """rows came in so many seconds, each worth ``per_row`` deliveries; before that, weight deliveries' worth."""
    shape, exposure = rows * per_row, seconds * per_row
    if before_per_s >= _LEAST_PER_S:
        shape, exposure = shape + weight, exposure + weight / before_per_s
    return Estimate(shape / exposure, shape / exposure**2) if exposure > 0 else Estimate()


def _dispersion(times: Sequence[float]) -> float:
    """phi: the mean time to the next delivery from any moment, in mean gaps; at least 1/2 (Cauchy and Schwarz)."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = math.fsum(gaps) / len(gaps)
    if mean <= 0:
        return 1.0
    seen = math.fsum(gap * gap for gap in gaps) / len(gaps) / (2 * mean * mean)
    return (_DISPERSION_WEIGHT + len(gaps) * seen) / (_DISPERSION_WEIGHT + len(gaps))


class _Window(msgspec.Struct, frozen=True):
    """times[i] and rows[i]: when delivery i came and how many rows had come with it (0: the opening of the window)."""

    times: Sequence[float]
    rows: Sequence[int]
    now_s: float
    per_row: float

    def estimate(self, since: int, weight: float, before_per_s: float) -> Estimate:
        """From the deliveries after ``since``; what was before weighs so much. A change counts as likely as it is."""
        came, took_s = self.rows[-1] - self.rows[since], self.now_s - self.times[since]
        whole = _posterior(weight, before_per_s, came, took_s, self.per_row)
        cut, ratio = self.best_cut(since)
        if ratio < _CHANGE - _DOUBT:
            return whole
        older_rows, older_s = self.rows[cut] - self.rows[since], self.times[cut] - self.times[since]
        older = _posterior(weight, before_per_s, older_rows, older_s, self.per_row)
        changed = self.estimate(cut, _BEFORE_DELIVERIES, older.mean_per_s)
        return _mixed(whole, changed, 1 / (1 + math.exp(_CHANGE - ratio)))

    def best_cut(self, since: int) -> tuple[int, float]:
        """The delivery after ``since`` that best parts two rates, and the log-likelihood ratio against one rate.

        A part lasts longer than the longest pause before it, and no burst is cut in two.
        """
        times, rows, now_s, per_row = self.times, self.rows, self.now_s, self.per_row
        begun_s, came, last = times[since], (rows[-1] - rows[since]) * per_row, len(times) - 1
        whole = _likelihood(came, now_s - begun_s)
        least_gap_s = _BURST * (now_s - begun_s) / max(1, last - since)
        found, best, longest_s = since, -math.inf, 0.0
        for cut in range(since + 1, last + 1):
            longest_s = max(longest_s, times[cut] - times[cut - 1])
            recent_s, before_s = now_s - times[cut], times[cut] - begun_s
            if recent_s <= longest_s:
                break
            if before_s <= 0 or (cut < last and times[cut + 1] - times[cut] < least_gap_s):
                continue
            before = (rows[cut] - rows[since]) * per_row
            ratio = _likelihood(before, before_s) + _likelihood(came - before, recent_s) - whole
            if ratio > best:
                found, best = cut, ratio
        return found, best


def _mixed(one: Estimate, other: Estimate, share: float) -> Estimate:
    """``other`` is right with the probability ``share``."""
    mean = (1 - share) * one.mean_per_s + share * other.mean_per_s
    within = (1 - share) * one.variance + share * other.variance
    return Estimate(mean, within + share * (1 - share) * (one.mean_per_s - other.mean_per_s) ** 2)


def _likelihood(deliveries: float, seconds: float) -> float:
    """Of so many deliveries at their own rate, as a logarithm, less what is the same however time is parted."""
    return deliveries * math.log(deliveries / seconds) if deliveries > 0 and seconds > 0 else 0.0
