"""A scenario, played to its end.

Invariant (I10): the same scenario and seed give the same events, lines and outcome, in whichever process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial

import msgspec

from echo2.simulation.lines import OnStep
from echo2.simulation.outcome import Outcome, outcome
from echo2.simulation.programs import COORDINATOR, LEARNER
from echo2.simulation.scenario import Scenario
from echo2.simulation.sections import EventSection
from echo2.simulation.world import SimulatedRun, World, simulate

SECONDS_PER_H = 3600.0


class Played(msgspec.Struct, frozen=True):
    run: SimulatedRun
    outcome: Outcome


def play(scenario: Scenario, on_step: OnStep | None = None) -> Played:
    """Raises Deadlock when nothing can go on or the horizon passed, Starved when the run's own watchdog ended it."""
    run = simulate(
        scenario.config,
        scenario.worker_models(),
        seed=scenario.world.seed,
        model=scenario.world_model(),
        scenario=partial(_happen_all, scenario.events) if scenario.events else None,
        machines=scenario.machine_models(),
        until_s=scenario.world.horizon_h * SECONDS_PER_H,
        on_step=on_step,
    )
    steps, warm_up = scenario.config.run.steps, scenario.world.warm_up_steps
    return Played(run, outcome(run.metrics, run.events, run.ended_s, steps, warm_up))


async def _happen_all(events: Sequence[EventSection], world: World) -> None:
    async with asyncio.TaskGroup() as group:
        for number, event in enumerate(events):
            group.create_task(_happen(world, event), name=f"event {number}")


async def _happen(world: World, event: EventSection) -> None:
    if event.at_step is not None:
        await world.lines.reached(event.at_step)
    else:
        await asyncio.sleep(event.at_s or 0.0)
    if event.what == "price":
        for offer in [name for name in world.pool.machines_of if fnmatchcase(name, event.who)]:
            world.pool.reprice(offer, event.usd_per_h)
        return
    async with asyncio.TaskGroup() as group:
        for name in _chosen(world, event):
            group.create_task(_befall(world, event, name), name=f"{event.what} {name}")


def _chosen(world: World, event: EventSection) -> list[str]:
    names = [name for name in (COORDINATOR, LEARNER, *world.working()) if fnmatchcase(name, event.who)]
    return names[: event.most or None]


async def _befall(world: World, event: EventSection, name: str) -> None:
    match event.what:
        case "preempt":
            await world.preempt(name)
        case "kill":
            await world.kill(name)
            await asyncio.sleep(event.for_s)
            world.start(name)
        case "slow":
            world.slow(name, event.factor)
            if event.for_s:
                await asyncio.sleep(event.for_s)
                world.slow(name, 1.0)
        case "cut":
            world.links[name].cut = True
            await asyncio.sleep(event.for_s)
            world.links[name].cut = False
