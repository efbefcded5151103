"""What can be asked before spending, and of which market.

Invariant: an ``Ask`` lists every (S, kappa) that may answer it, and what was given is among them, legal or not: whether
it can be is told by who answers (``provisioning.plan``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from echo2.errors import UserError
from echo2.provisioning.demand import (
    LARGEST_STALENESS_BUDGET,
    SMALLEST_PUBLISH_PERIOD,
    SMALLEST_STALENESS_BUDGET,
    Cadence,
    Demand,
)
from echo2.provisioning.offers import Offer, Terms, received_gb_per_h

Kappa = int | Literal["auto", "default"]
"""``default`` is S − 1."""
Policy = Literal["cheapest", "exact", "greedy", "random"]
LARGEST_SURVEYED_BUDGET = 11
"""The largest S of the paper, at which plain GRPO diverged: where S is left open, none beyond it is tried."""


class Market(msgspec.Struct, frozen=True, kw_only=True):
    """What can be rented, and what its cost depends on."""

    offers: tuple[Offer, ...] = ()
    bytes_per_publish: float = 0.0
    """What each worker receives in a publish period; 0 leaves the price of traffic out."""
    rental_h: float = math.inf
    """How long machines are meant to be kept."""

    @property
    def reach_per_s(self) -> float:
        """What all machines together are expected to deliver."""
        return math.fsum(offer.count * offer.expected_rollouts_per_s for offer in self.offers)

    def terms(self, t_train_s: float, publish_period: int) -> Terms:
        received = received_gb_per_h(
            bytes_per_publish=self.bytes_per_publish, t_train_s=t_train_s, publish_period=publish_period
        )
        return Terms(received, self.rental_h)


class Rent(msgspec.Struct, frozen=True):
    """Machines that keep the learner saturated."""

    policy: Policy = "cheapest"


class Afford(msgspec.Struct, frozen=True):
    """The shortest step for so much an hour."""

    workers_usd_per_h: float


class Use(msgspec.Struct, frozen=True):
    """What a pool does that is there already: one of this rate, or the whole market."""

    mu_per_s: float | None = None


Question = Rent | Afford | Use


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A demand at a given cadence, or at one to be found.

    Raises UserError for an S beyond all use.
    """

    demand: Demand
    staleness_budget: int | None
    """None leaves S open, up to ``LARGEST_SURVEYED_BUDGET``."""
    publish_period: Kappa = "default"

    def __post_init__(self) -> None:
        if self.staleness_budget is not None and self.staleness_budget > LARGEST_STALENESS_BUDGET:
            raise UserError(f"S must be at most {LARGEST_STALENESS_BUDGET} steps, got {self.staleness_budget}")

    def cadences(self) -> list[Cadence]:
        """What is to be tried; what was given is among it, legal or not."""
        if self.staleness_budget is None:
            budgets = range(SMALLEST_STALENESS_BUDGET, LARGEST_SURVEYED_BUDGET + 1)
        else:
            budgets = range(self.staleness_budget, self.staleness_budget + 1)
        found = [Cadence(budget, period) for budget in budgets for period in self._periods(budget)]
        legal = [cadence for cadence in found if cadence.publish_period < cadence.staleness_budget]
        return legal if self.staleness_budget is None and legal else found

    def _periods(self, budget: int) -> Sequence[int]:
        if self.publish_period == "auto":
            return range(SMALLEST_PUBLISH_PERIOD, max(budget, SMALLEST_PUBLISH_PERIOD + 1))
        return (max(1, budget - 1),) if self.publish_period == "default" else (self.publish_period,)

    def at(self, cadence: Cadence) -> Ask:
        return msgspec.structs.replace(
            self, staleness_budget=cadence.staleness_budget, publish_period=cadence.publish_period
        )

    def with_t_bcast(self, t_bcast_s: float) -> Ask:
        demand = msgspec.structs.replace(self.demand, times=self.demand.times.with_t_bcast(t_bcast_s))
        return msgspec.structs.replace(self, demand=demand)
