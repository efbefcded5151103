"""Workers that joined by themselves, as a pool: they wait, warm, until they are needed.

Invariant: a volunteer works for one machine id at a time or for none, and costs something only while it works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from echo2.errors import Refused
from echo2.ports import Clock
from echo2.provisioning.observation import Listing, Phase, listed
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.pool import Handle
from echo2.provisioning.tariff import LEAST_USD_PER_H

PREFIX = "standby-"


class Volunteer(msgspec.Struct, frozen=True):
    worker_id: str
    usd_per_h: float
    measured_per_s: float | None
    """Trajectories per second that it delivered; None before any."""
    is_heard: bool
    """Its heartbeats arrive, and it was not told to go."""
    machine_id: str = ""
    """That it works for; empty while it waits."""


class Benches(Protocol):
    """Where volunteers wait."""

    def volunteers(self) -> Sequence[Volunteer]: ...

    def call(self, worker_id: str, machine_id: str) -> None:
        """Let it work."""
        ...

    def rest(self, worker_id: str) -> None:
        """Let it wait again."""
        ...


class StandbyPool:
    name = "standby"

    def __init__(self, benches: Benches, expected_per_s: float, clock: Clock) -> None:
        """expected_per_s: of a volunteer that has not delivered anything yet."""
        self._benches = benches
        self._expected_per_s = expected_per_s
        self._clock = clock

    async def listings(self) -> Sequence[Listing]:
        now_s = self._clock.monotonic()
        return [listed(self._offer(x), now_s) for x in self._benches.volunteers() if x.is_heard]

    async def start(self, machine_id: str, offer: str) -> Handle:
        for volunteer in self._benches.volunteers():
            if volunteer.machine_id == machine_id:
                return self._handle(volunteer)
            if _offer_name(volunteer) == offer:
                if volunteer.machine_id or not volunteer.is_heard:
                    raise Refused(f"{offer} does not wait any more")
                self._benches.call(volunteer.worker_id, machine_id)
                return self._handle(msgspec.structs.replace(volunteer, machine_id=machine_id))
        raise Refused(f"{offer} is gone")

    async def stop(self, machine_id: str) -> None:
        for volunteer in self._benches.volunteers():
            if volunteer.machine_id == machine_id:
                self._benches.rest(volunteer.worker_id)

    async def machines(self) -> Sequence[Handle]:
        return [self._handle(x) for x in self._benches.volunteers() if x.machine_id]

    def _offer(self, volunteer: Volunteer) -> Offer:
        return Offer(
            name=_offer_name(volunteer),
            gpu="its own",
            count=1,
            usd_per_h=max(volunteer.usd_per_h, LEAST_USD_PER_H),  # 0 means unknown elsewhere; here it is free
            rollouts_per_s=volunteer.measured_per_s or self._expected_per_s,
            estimated=volunteer.measured_per_s is None,
        )

    def _handle(self, volunteer: Volunteer) -> Handle:
        return Handle(
            machine_id=volunteer.machine_id,
            offer=_offer_name(volunteer),
            phase=Phase.ACTIVE if volunteer.is_heard else Phase.LOST,
            usd_per_h=volunteer.usd_per_h,
        )


def _offer_name(volunteer: Volunteer) -> str:
    return f"{PREFIX}{volunteer.worker_id}"
