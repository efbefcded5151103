"""Machines on a Ray cluster: each is an actor that runs one worker on the node where Ray places it.

Invariant: an actor's name is its machine's id and offer, in a namespace of the run. So an id is started once however
often it is asked for, and a coordinator that starts again finds what it had. A machine that was started or found here
and is gone stays, as lost, until it is stopped.

Ray itself is a process away (``ray_driver``) and is not imported here.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from echo2.errors import Refused, UserError
from echo2.ports import Clock
from echo2.provisioning.capacity import SECONDS_PER_H
from echo2.provisioning.observation import Listing, Phase, listed
from echo2.provisioning.pools.invite import Invite
from echo2.provisioning.pools.pool import Handle
from echo2.provisioning.pools.ray_line import DRIVER, RayLine
from echo2.provisioning.pools.ray_machine import WORKER
from echo2.provisioning.pools.ray_messages import Duty, Found, Look, Reply, Start, Stop
from echo2.provisioning.pools.ray_offers import Placed, RayOffer, most

_GONE = (Phase.LOST, Phase.FAILED)


class RayPool:
    """Use as a context: leaving it ends the line to Ray and leaves the machines as they are."""

    name = "ray"

    def __init__(
        self,
        run_id: str,
        offers: Sequence[RayOffer],
        invite: Invite,
        clock: Clock,
        log: Path,
        *,
        address: str = "auto",
        folder: str = "~/echo2-worker",
        program: Sequence[str] = WORKER,
        driver: Sequence[str] = DRIVER,
    ) -> None:
        """
        log: file for what Ray says.  address: of the cluster, as for ``ray.init``; ``auto`` is the one of this machine.
        folder: on every node, where workers keep credential, spool and snapshots.
        program: what a node's Python is run with as a worker.  driver: the command of the line's process.

        Raises UserError when Ray is not installed, or for offers that cannot be told apart.
        """
        if driver is DRIVER and importlib.util.find_spec("ray") is None:
            raise UserError("the ray pool must have Ray, which is not installed: install echo2[ray]")
        self._offers = {each.offer.name: each for each in offers}
        if len(self._offers) < len(offers):
            raise UserError("names of the ray pool's offers must differ")
        self._invite = invite
        self._clock = clock
        self._folder = f"{folder}/{run_id}"
        self._program = tuple(program)
        self._line = RayLine(address, f"echo2-{run_id}", log, driver)
        self._known: dict[str, Handle] = {}
        """Started or found, and not stopped."""

    async def __aenter__(self) -> Self:
        await self._line.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._line.__aexit__(*error)

    async def listings(self) -> Sequence[Listing]:
        """What the cluster has room for now; an offer that it has no room for is left out."""
        seen = await self._look()
        ours = [Placed(found.offer, found.node_id) for found in seen.machines if found.phase not in _GONE]
        counts = most(list(self._offers.values()), seen.nodes, seen.available, ours)
        now_s = self._clock.monotonic()
        return [
            listed(msgspec.structs.replace(each.offer, count=counts[name]), now_s)
            for name, each in self._offers.items()
            if counts[name]
        ]

    async def start(self, machine_id: str, offer: str) -> Handle:
        if machine_id in self._known:
            return self._known[machine_id]
        if offer not in self._offers:
            raise Refused(f"the ray pool's offers are {', '.join(sorted(self._offers))}, got {offer}")
        each = self._offers[offer]
        duty = Duty(
            machine_id=machine_id,
            offer=offer,
            usd_per_h=each.offer.usd_per_h,
            join=await self._invite(machine_id),
            program=self._program,
            folder=self._folder,
        )
        await self._line.call(lambda number: Start(number, duty, each.needs))
        ordered = Found(machine_id=machine_id, offer=offer, phase=Phase.STARTING)
        return self._known.setdefault(machine_id, self._handle(ordered))

    async def stop(self, machine_id: str) -> None:
        await self._line.call(lambda number: Stop(number, machine_id))
        self._known.pop(machine_id, None)

    async def machines(self) -> Sequence[Handle]:
        await self._look()
        return list(self._known.values())

    async def _look(self) -> Reply:
        seen = await self._line.call(Look)
        here = {found.machine_id for found in seen.machines}
        for found in seen.machines:
            self._known[found.machine_id] = self._handle(found)
        for machine_id, handle in self._known.items():
            if machine_id not in here and handle.phase not in _GONE:
                self._known[machine_id] = msgspec.structs.replace(
                    handle, phase=Phase.LOST, detail="it was gone when the line to Ray was there again"
                )
        return seen

    def _handle(self, found: Found) -> Handle:
        """A minimum rental runs from the order where that is known, else from when the worker was started."""
        each = self._offers.get(found.offer)
        known = self._known.get(found.machine_id)
        paid_until_s = -math.inf
        if known is not None:
            paid_until_s = known.paid_until_s
        elif each is not None and each.offer.min_rental_h:
            paid_until_s = self._clock.monotonic() - found.age_s + each.offer.min_rental_h * SECONDS_PER_H
        return Handle(
            machine_id=found.machine_id,
            offer=found.offer,
            phase=found.phase,
            usd_per_h=each.offer.usd_per_h if each is not None else found.usd_per_h or 0.0,
            paid_until_s=paid_until_s,
            detail=found.detail,
        )
