"""What workers deliver and what the run has cost so far, from observations alone.

Invariant: both estimates are immutable values; the caller's monotonic clock enters as a number, so a replay of the same
observations gives the same estimate.

A worker's rate mu_i counts rewarded trajectories that reached the buffer, so it includes generation, scoring, network
and stragglers (paper §3). Two rules make it usable for provisioning:

- it is taken over the last ``WINDOW`` deliveries rather than over a fixed time, because a group takes a second on a
  toy model and half an hour on a real one;
- time in which the coordinator held the worker back (lease gate, no policy yet) does not count. Otherwise a pool that
  is larger than the demand would look exactly as large as the demand, and nothing could ever be released.
"""

from __future__ import annotations

import math

import msgspec

from echo2.errors import UserError
from echo2.provisioning.capacity import cost_usd

WINDOW = 32
"""Deliveries that an estimate spans: the relative error of a rate over n independent groups falls as 1/sqrt(n)."""


class DeliveryRate(msgspec.Struct, frozen=True):
    """mu_i of one worker.

    Example: ``DeliveryRate(opened_s=0.0).delivered(4.0, 8).rate_per_s(4.0) == 2.0``.
    """

    opened_s: float
    """When the window opened, on the worker's working clock (monotonic time minus time held)."""
    held_s: float = 0.0
    """All time held so far."""
    deliveries: tuple[tuple[float, int], ...] = ()
    """(working time, trajectories) of the last ``WINDOW`` deliveries, oldest first."""

    def delivered(self, now_s: float, rows: int) -> DeliveryRate:
        """``rows`` rewarded trajectories arrived at ``now_s``."""
        deliveries = (*self.deliveries, (now_s - self.held_s, rows))
        if len(deliveries) <= WINDOW:
            return msgspec.structs.replace(self, deliveries=deliveries)
        return msgspec.structs.replace(self, opened_s=deliveries[0][0], deliveries=deliveries[1:])

    def held(self, seconds: float) -> DeliveryRate:
        """The worker was denied work for ``seconds``, times the share of its lease loops that waited."""
        return msgspec.structs.replace(self, held_s=self.held_s + max(0.0, seconds))

    def rate_per_s(self, now_s: float) -> float:
        """Trajectories per second of working time; falls while nothing arrives, 0 before the first delivery."""
        if not self.deliveries:
            return 0.0
        working_s = max(now_s - self.held_s, self.deliveries[-1][0]) - self.opened_s
        return sum(rows for _, rows in self.deliveries) / working_s if working_s > 0 else 0.0


class Rental(msgspec.Struct, frozen=True):
    """One machine being paid for."""

    usd_per_h: float
    since_s: float


class Ledger(msgspec.Struct, frozen=True):
    """What has been spent: price times time rented, machine by machine.

    A coordinator that restarts opens a ledger with the ``settled_usd`` it had recorded.
    """

    settled_usd: float = 0.0
    """Cost of rentals that ended, and of ended price periods of running ones."""
    rentals: dict[str, Rental] = {}

    def rent(self, name: str, usd_per_h: float, now_s: float) -> Ledger:
        """From now on ``name`` costs this much; a second call changes the price."""
        if not (usd_per_h >= 0 and math.isfinite(usd_per_h)):
            raise UserError(f"the price of {name} must be at least 0 USD/h, got {usd_per_h:g}")
        ended = self.release(name, now_s)
        return Ledger(ended.settled_usd, {**ended.rentals, name: Rental(usd_per_h, now_s)})

    def release(self, name: str, now_s: float) -> Ledger:
        """``name`` costs nothing from now on; unknown names change nothing."""
        if name not in self.rentals:
            return self
        ended = self.rentals[name]
        settled = cost_usd([(ended.usd_per_h, max(0.0, now_s - ended.since_s))])
        remaining = {other: rental for other, rental in self.rentals.items() if other != name}
        return Ledger(self.settled_usd + settled, remaining)

    def total_usd(self, now_s: float) -> float:
        """Everything spent until ``now_s``."""
        running = ((r.usd_per_h, max(0.0, now_s - r.since_s)) for r in self.rentals.values())
        return self.settled_usd + cost_usd(running)

    @property
    def usd_per_h(self) -> float:
        """What an hour costs at the moment."""
        return math.fsum(r.usd_per_h for r in self.rentals.values())
