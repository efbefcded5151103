"""What the controller is told at one moment: times, machines, and what could be rented.

Invariant: plain values. A machine has one id from the order for it until it is gone, and counts once, whoever reports
it: ``merged`` joins what the pool and the coordinator say of the same machine.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import msgspec

from echo2.provisioning.offers import Offer
from echo2.provisioning.rates import Estimate


class Phase(enum.StrEnum):
    STARTING = "starting"
    """Ordered, and no worker on it was heard yet."""
    ACTIVE = "active"
    """Its worker joined."""
    DRAINING = "draining"
    """It finishes what it has: told to go, or the provider gave notice."""
    FAILED = "failed"
    """It never came up: the provider refused or gave up."""
    LOST = "lost"
    """Taken away or dead."""


_REACHED = tuple(Phase)
"""In the order of a machine's life; of two reports the later phase is right."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, starting or with its worker."""

    machine_id: str
    offer: str = ""
    """Name of its offer; empty for a worker that joined by itself, which counts and is never released."""
    phase: Phase
    usd_per_h: float = 0.0
    """c_i, traffic included."""
    rate: Estimate = Estimate()
    """mu_i of its worker: what reached the buffer, not what it claims (``rates.DeliveryRate``)."""
    available: bool = True
    """a_i: heartbeats arrive."""
    delivered: bool = False
    """Anything of it ever reached the buffer."""
    start_by_s: float | None = None
    """Of a machine that starts: when it counts as failed; None where only the controller knows."""
    paid_until_s: float = -math.inf
    """End of its minimum rental."""


class Price(msgspec.Struct, frozen=True):
    """What a feed said of an offer."""

    usd_per_h: float | None
    """None, 0, negative or not finite: unknown, whatever the feed meant by it (field report I01)."""
    at_s: float
    """When it was true, on the controller's clock."""


class Listing(msgspec.Struct, frozen=True):
    """An offer, and what is known of its price now."""

    offer: Offer
    """``count`` is how many of these machines the run may have at one time; the price is ``prices``' alone."""
    prices: tuple[Price, ...] = ()
    """In any order; several of one moment are different sellers."""


def listed(offer: Offer, now_s: float) -> Listing:
    """An offer whose price a person stands by: it is true now."""
    return Listing(offer, (Price(offer.usd_per_h, now_s),))


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision rests on."""

    now_s: float
    """The controller's monotonic clock."""
    t_train_s: float | None = None
    """Median of the last steps; None until it was profiled."""
    t_bcast_s: float | None = None
    """None until a publish was measured."""
    t_gen_s: float | None = None
    """Time to finish a group; None until one was."""
    machines: tuple[Machine, ...] = ()
    listings: tuple[Listing, ...] = ()
    spent_usd: float = 0.0
    """By the ledger, learner included."""
    received_gb_per_h: float = 0.0
    """What a worker receives: a seller's traffic price counts so many times."""
    ending: bool = False
    """The run ends: whatever is missing, nothing is begun any more."""
    learner_usd_per_h: float = 0.0


def merged(machines: Iterable[Machine]) -> tuple[Machine, ...]:
    """Each machine once, by id: of several reports the one furthest in its life, which keeps what others know."""
    found: dict[str, Machine] = {}
    for machine in sorted(
        machines, key=lambda m: (m.machine_id, _REACHED.index(m.phase), m.delivered, m.rate.mean_per_s)
    ):
        before = found.get(machine.machine_id)
        if before is not None:
            machine = msgspec.structs.replace(
                machine,
                offer=machine.offer or before.offer,
                usd_per_h=max(machine.usd_per_h, before.usd_per_h),
                rate=machine.rate if machine.rate.mean_per_s > 0 else before.rate,
                available=machine.available and (before.available or before.phase is Phase.STARTING),
                delivered=machine.delivered or before.delivered,
                start_by_s=before.start_by_s if machine.start_by_s is None else machine.start_by_s,
                paid_until_s=max(machine.paid_until_s, before.paid_until_s),
            )
        found[machine.machine_id] = machine
    return tuple(found.values())
