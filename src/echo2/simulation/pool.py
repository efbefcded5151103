"""Machines that a simulated run rents.

Invariant: a machine's worker is the production worker, enrolled over the production invitation; only the time that a
machine takes to start, and what becomes of it, are modelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from echo2.errors import Refused
from echo2.ports import Clock
from echo2.provisioning.capacity import SECONDS_PER_H
from echo2.provisioning.observation import Listing, Phase, listed
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.invite import Invite
from echo2.provisioning.pools.pool import Handle
from echo2.simulation.models import WorkerModel


class MachineModel(msgspec.Struct, frozen=True):
    """Machines of one offer."""

    offer: Offer
    """What is told of them."""
    group_s: float
    """Median time in which one of them generates a group, whatever the offer says."""
    start_s: float = 30.0
    """From the order until its worker runs."""
    worker: WorkerModel | None = None
    """What else its worker is like."""

    def worker_named(self, name: str) -> WorkerModel:
        return msgspec.structs.replace(self.worker or WorkerModel(name), name=name, group_s=self.group_s)


class ModelledPool:
    name = "modelled"

    def __init__(
        self,
        machines: Mapping[str, MachineModel],
        clock: Clock,
        begin: Callable[[str, str, MachineModel], Awaitable[None]],
        end: Callable[[str], Awaitable[None]],
    ) -> None:
        """machines: by name of the offer.  begin: a worker, for a machine's id, with a join string.  end: kill it."""
        self.machines_of = dict(machines)
        self.invite: Invite | None = None
        """Of the coordinator's present life; while there is none, nobody is heard."""
        self._clock = clock
        self._begin = begin
        self._end = end
        self._handles: dict[str, Handle] = {}

    async def listings(self) -> Sequence[Listing]:
        return [listed(model.offer, self._clock.monotonic()) for model in self.machines_of.values()]

    async def start(self, machine_id: str, offer: str) -> Handle:
        if machine_id not in self._handles:
            model = self.machines_of.get(offer)
            if model is None:
                raise Refused(f"{offer} is sold out")
            rented, now_s = model.offer, self._clock.monotonic()
            self._handles[machine_id] = Handle(
                machine_id=machine_id, offer=offer, phase=Phase.STARTING, usd_per_h=rented.usd_per_h,
                paid_until_s=now_s + rented.min_rental_h * SECONDS_PER_H,
            )  # fmt: skip
            await asyncio.sleep(model.start_s)
            if self.invite is not None and self._is_starting(machine_id):
                await self._begin(machine_id, await self.invite(machine_id), model)
                self._set(machine_id, Phase.ACTIVE)
        if machine_id not in self._handles:
            raise Refused(f"{machine_id} was given back while it started")
        return self._handles[machine_id]

    async def stop(self, machine_id: str) -> None:
        if self.invite is not None and self._handles.pop(machine_id, None) is not None:
            await self._end(machine_id)

    async def machines(self) -> Sequence[Handle]:
        return [self._handles[name] for name in sorted(self._handles)]

    def reprice(self, offer: str, usd_per_h: float) -> None:
        """From now on it is rented at this price; machines that run keep theirs."""
        model = self.machines_of[offer]
        changed = msgspec.structs.replace(model.offer, usd_per_h=usd_per_h)
        self.machines_of[offer] = msgspec.structs.replace(model, offer=changed)

    def has(self, machine_id: str) -> bool:
        return machine_id in self._handles

    async def preempt(self, machine_id: str) -> None:
        """The provider takes it away, without notice."""
        self._set(machine_id, Phase.LOST)
        await self._end(machine_id)

    def _is_starting(self, machine_id: str) -> bool:
        handle = self._handles.get(machine_id)
        return handle is not None and handle.phase is Phase.STARTING

    def _set(self, machine_id: str, phase: Phase) -> None:
        if machine_id in self._handles:
            self._handles[machine_id] = msgspec.structs.replace(self._handles[machine_id], phase=phase)
