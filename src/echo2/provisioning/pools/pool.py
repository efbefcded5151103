"""Where machines come from: one small protocol before processes of this machine, waiting workers, Ray and SkyPilot.

Invariant: a machine is known by the id its order gave it, everywhere and for good. Its worker joins under that id as
its name, so that what the pool says of the machine and what the coordinator says of its worker meet. Starting an id
twice starts one machine; stopping it makes sure that there is none, whatever was known of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from echo2.provisioning.observation import Listing, Machine, Phase


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as its pool knows it."""

    machine_id: str
    offer: str
    phase: Phase
    """``ACTIVE``: it runs; whether its worker works is the coordinator's to say. ``DRAINING``: there was notice."""
    usd_per_h: float
    """What it is billed at now."""
    paid_until_s: float = -math.inf
    """End of its minimum rental, on the caller's clock."""
    detail: str = ""
    """What the provider says of it, for people."""

    def machine(self) -> Machine:
        """What the controller is told while nothing is known of its worker: it starts, or is gone."""
        phase = Phase.STARTING if self.phase is Phase.ACTIVE else self.phase
        return Machine(
            machine_id=self.machine_id,
            offer=self.offer,
            phase=phase,
            usd_per_h=self.usd_per_h,
            paid_until_s=self.paid_until_s,
        )


class Pool(Protocol):
    """Every call returns or raises within the caller's deadline; a cancelled one may have been carried out.

    All raise TransportError when the provider cannot be reached (worth retrying), Refused when it says no.
    """

    @property
    def name(self) -> str: ...

    async def listings(self) -> Sequence[Listing]:
        """Its offers with what is known of their prices now. Names of offers are unique among all pools of a run."""
        ...

    async def start(self, machine_id: str, offer: str) -> Handle:
        """Order a machine and start a worker on it; returns once the order stands, long before the worker joins."""
        ...

    async def stop(self, machine_id: str) -> None:
        """Give it back; returns once nothing more will be billed than its minimum. Unknown ids are no error."""
        ...

    async def machines(self) -> Sequence[Handle]:
        """All that were started and not stopped, the lost ones among them until they are stopped."""
        ...
