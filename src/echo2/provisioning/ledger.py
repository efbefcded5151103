"""What the run has cost so far: price times time rented, machine by machine, the learner's among them.

Invariant: the total is the integral of the price function of every machine over the time it is billed; it never falls,
and does not depend on how often it was looked at. A machine that is released before its minimum rental ended is billed
to the end of it, at once; one that was taken away costs nothing from that moment.

Immutable values; time is the caller's monotonic clock, as a number.
"""

from __future__ import annotations

import math

import msgspec

from echo2.errors import UserError
from echo2.provisioning.capacity import cost_usd


class Rental(msgspec.Struct, frozen=True):
    """One machine being paid for."""

    usd_per_h: float
    since_s: float
    """Of this price."""
    paid_until_s: float = -math.inf
    """End of the minimum rental."""

    def cost_usd(self, now_s: float) -> float:
        return cost_usd([(self.usd_per_h, max(0.0, now_s - self.since_s))])


class Ledger(msgspec.Struct, frozen=True):
    """What has been spent.

    A coordinator that restarts opens a ledger with the ``settled_usd`` it had recorded; what was paid for meanwhile it
    rents from when that was counted.
    """

    settled_usd: float = 0.0
    """Of earlier lives, whoever it was spent on."""
    rentals: dict[str, Rental] = {}
    """What is being paid for now."""
    ended_usd: dict[str, float] = {}
    """By name: cost of rentals that ended, and of ended price periods of running ones."""
    told_usd: float = 0.0
    """Total when a step was last charged."""

    def rent(self, name: str, usd_per_h: float, now_s: float, min_rental_s: float = 0.0) -> Ledger:
        """From now on ``name`` costs this much. A second call changes the price; the minimum runs from the first.

        Raises UserError for a price that is negative or not finite.
        """
        if not (usd_per_h >= 0 and math.isfinite(usd_per_h)):
            raise UserError(f"the price of {name} must be at least 0 USD/h, got {usd_per_h:g}")
        running = self.rentals.get(name)
        paid_until_s = now_s + min_rental_s if running is None else running.paid_until_s
        settled = self.lose(name, now_s)
        rental = Rental(usd_per_h, max(now_s, running.since_s) if running else now_s, paid_until_s)
        return msgspec.structs.replace(settled, rentals={**settled.rentals, name: rental})

    def release(self, name: str, now_s: float) -> Ledger:
        """``name`` is given back: billed to the end of its minimum rental at least. Unknown names change nothing."""
        running = self.rentals.get(name)
        return self if running is None else self.lose(name, max(now_s, running.paid_until_s))

    def lose(self, name: str, now_s: float) -> Ledger:
        """``name`` was taken away (preempted, died): the price stops. Unknown names change nothing."""
        running = self.rentals.get(name)
        if running is None:
            return self
        ended = {**self.ended_usd, name: self.ended_usd.get(name, 0.0) + running.cost_usd(now_s)}
        remaining = {other: rental for other, rental in self.rentals.items() if other != name}
        return msgspec.structs.replace(self, rentals=remaining, ended_usd=ended)

    def total_usd(self, now_s: float) -> float:
        """Everything spent until ``now_s``."""
        running = (rental.cost_usd(now_s) for rental in self.rentals.values() if rental.usd_per_h > 0)
        return math.fsum((self.settled_usd, *self.ended_usd.values(), *running))

    def by_name_usd(self, now_s: float) -> dict[str, float]:
        """What each machine has cost, ``settled_usd`` left out, in order of names."""
        names = sorted({*self.ended_usd, *self.rentals})
        costs = {}
        for name in names:
            running = self.rentals[name].cost_usd(now_s) if name in self.rentals else 0.0
            costs[name] = self.ended_usd.get(name, 0.0) + running
        return costs

    def step(self, now_s: float) -> tuple[Ledger, float]:
        """What was spent since the last call: the cost of the training step that ends now."""
        total = self.total_usd(now_s)
        return msgspec.structs.replace(self, told_usd=max(total, self.told_usd)), max(0.0, total - self.told_usd)

    @property
    def usd_per_h(self) -> float:
        """What an hour costs at the moment."""
        return math.fsum(rental.usd_per_h for rental in self.rentals.values())
