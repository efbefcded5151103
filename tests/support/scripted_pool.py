"""A pool that does as it is told, and a run that needs it, for the controller's shell in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from echo2.coordinator.wakeup import Wakeup
from echo2.errors import Refused, TransportError
from echo2.ports import Clock
from echo2.provisioning.controller import State
from echo2.provisioning.drive import Past
from echo2.provisioning.observation import Listing, Machine, Observation, Phase, listed
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.pool import Handle
from echo2.provisioning.rates import Estimate


class ScriptedPool:
    def __init__(self, name: str, clock: Clock, *offers: Offer, start_s: float = 30.0) -> None:
        self.name, self.clock, self.start_s = name, clock, start_s
        self.offers = {offer.name: offer for offer in offers}
        self.there: dict[str, Handle] = {}
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.hangs = False
        self.refuses = 0
        """So many starts to come are refused."""
        self.deaf_stops = 0

    async def listings(self) -> Sequence[Listing]:
        if self.hangs:
            await asyncio.sleep(1e6)
        return [listed(offer, self.clock.monotonic()) for offer in self.offers.values()]

    async def start(self, machine_id: str, offer: str) -> Handle:
        self.started.append(machine_id)
        if self.refuses:
            self.refuses -= 1
            raise Refused("no capacity")
        await asyncio.sleep(self.start_s)
        price = self.offers[offer].usd_per_h
        handle = Handle(machine_id=machine_id, offer=offer, phase=Phase.ACTIVE, usd_per_h=price)
        self.there[machine_id] = handle
        return handle

    async def stop(self, machine_id: str) -> None:
        if self.deaf_stops:
            self.deaf_stops -= 1
            raise TransportError("no route")
        self.stopped.append(machine_id)
        self.there.pop(machine_id, None)

    async def machines(self) -> Sequence[Handle]:
        if self.hangs:
            await asyncio.sleep(1e6)
        return list(self.there.values())


class ScriptedRun:
    """Every machine that is there works at its offer's rate from then on."""

    def __init__(self, clock: Clock, *pools: ScriptedPool, t_train_s: float = 100.0) -> None:
        self.clock, self.pools, self.t_train_s = clock, pools, t_train_s
        self.over = False
        self.ended = ""
        self.spent_usd = 0.0
        self.states: list[State] = []
        self.past = Past()
        self.given_back: list[str] = []
        self.dead: set[str] = set()
        self.drained: list[str] = []
        self.drain_s = 5.0
        self.group_s = 0.0
        self.news = Wakeup()

    def observe(self, handles: Sequence[Handle], listings: Sequence[Listing]) -> Observation:
        rates = {offer.name: offer.rollouts_per_s for pool in self.pools for offer in pool.offers.values()}
        machines = [handle.machine() for handle in handles]
        for handle in handles:
            if handle.phase is Phase.ACTIVE:
                phase = Phase.LOST if handle.machine_id in self.dead else Phase.ACTIVE
                rate = Estimate(rates[handle.offer])
                machines.append(Machine(machine_id=handle.machine_id, phase=phase, rate=rate, delivered=True))
        return Observation(
            now_s=self.clock.monotonic(),
            t_train_s=self.t_train_s,
            t_bcast_s=20.0,
            machines=tuple(machines),
            listings=tuple(listings),
            spent_usd=self.spent_usd,
        )

    def remember(self, past: Past) -> None:
        self.past = past
        self.states.append(past.state)

    async def drain(self, machine_id: str) -> None:
        await asyncio.sleep(self.drain_s)
        self.drained.append(machine_id)

    def end(self, reason: str) -> None:
        self.ended = reason

    def returned(self, machine_id: str) -> None:
        self.given_back.append(machine_id)

    async def wait(self, timeout_s: float) -> None:
        await self.news.wait(timeout_s)
