"""The events of a scenario, brought upon a world.

Invariant: what befalls a program that is dead already, or a machine that is gone, changes nothing; events that never
came to pass are told. Patterns stand for workers alone: learner and coordinator are meant only by their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fnmatch import fnmatchcase

from echo2.simulation.lines import WatchedLines
from echo2.simulation.programs import COORDINATOR, LEARNER
from echo2.simulation.sections import EventSection
from echo2.simulation.world import World


class Story:
    """One telling of it."""

    def __init__(self, events: Sequence[EventSection]) -> None:
        self.events = events
        self.lines = WatchedLines()
        """Of the run that it was told to."""
        self._own = frozenset[str]()
        """Workers that nobody rents."""
        self._befell: dict[int, int] = {}
        """How many each event befell that came to pass."""
        self._away: set[str] = set()
        """Killed, and not to be started again by anybody else."""
        self._gone: set[str] = set()
        """Taken away for good."""

    async def tell(self, world: World) -> None:
        self.lines = world.lines
        self._own = frozenset(world.workers)
        async with asyncio.TaskGroup() as group:
            for number, event in enumerate(self.events):
                group.create_task(self._happen(world, number, event), name=f"event {number}")

    def missed(self) -> list[str]:
        """A sentence for each event that came to nothing."""
        told = []
        for number, event in enumerate(self.events):
            if number not in self._befell:
                when = f"at {event.at_s:g} s" if event.at_step is None else f"after step {event.at_step}"
                told.append(f"events.{number} ({event.what} {event.who} {when}) did not happen: the run was over")
            elif not self._befell[number]:
                told.append(f"events.{number} ({event.what} {event.who}) befell nobody: none of them was there then")
        return told

    async def _happen(self, world: World, number: int, event: EventSection) -> None:
        if event.at_step is not None:
            await world.lines.reached(event.at_step)
        else:
            await asyncio.sleep(event.at_s or 0.0)
        if event.what == "price":
            names = [name for name in world.pool.machines_of if fnmatchcase(name, event.who)][: event.most or None]
            for name in names:
                world.pool.reprice(name, event.usd_per_h)
        else:
            names = self._chosen(world, event)
        self._befell[number] = len(names)
        if event.what != "price":
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(self._befall(world, event, name), name=f"{event.what} {name}")

    def _chosen(self, world: World, event: EventSection) -> list[str]:
        if event.who in (COORDINATOR, LEARNER):
            return [event.who] if event.who not in self._away else []
        return [name for name in world.working() if fnmatchcase(name, event.who)][: event.most or None]

    async def _befall(self, world: World, event: EventSection, name: str) -> None:
        match event.what:
            case "preempt":
                self._gone.add(name)
                await world.preempt(name)
            case "kill":
                self._away.add(name)
                await world.kill(name)
                await asyncio.sleep(event.for_s)
                self._away.discard(name)
                if self._returns(world, name):
                    world.start(name)
            case "slow":
                world.slow(name, event.factor)
                if event.for_s:
                    await asyncio.sleep(event.for_s)
                    world.slow(name, 1.0)
            case _:
                line = world.links[name]
                line.cut = True
                await asyncio.sleep(event.for_s)
                line.cut = False

    def _returns(self, world: World, name: str) -> bool:
        """Whether there is a machine for it to begin again on, and it has not begun by itself."""
        if name in (COORDINATOR, LEARNER):
            return True
        there = name in self._own or world.pool.has(name)
        return there and name not in self._gone and name not in world.working()
