"""What befalls machines: preemption, churn and slow spells, as random processes in virtual time.

Invariant (I10): each process draws from a stream of its own: the same seed brings the same fates at the same moments,
whatever the programs do meanwhile. Times between events are exponential.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from echo2.simulation.world import World

S_PER_H = 3600.0


class SlowSpells(msgspec.Struct, frozen=True):
    """Times in which a machine is slow: a neighbour, heat, a noisy disk. They come at random."""

    per_h: float = 0.0
    mean_s: float = 300.0
    factor: float = 3.0


class FateModel(msgspec.Struct, frozen=True):
    """What may befall each worker."""

    preemptions_per_h: float = 0.0
    """The machine is taken away for good, without notice."""
    crashes_per_h: float = 0.0
    """The worker's process dies and begins again."""
    restart_s: float = 30.0
    """After a crash."""
    outages_per_h: float = 0.0
    """Its line goes down and comes back."""
    outage_s: float = 20.0
    """Mean."""
    spells: SlowSpells = SlowSpells()
    arrives_s: float = 0.0
    """When the worker begins; later than 0 for one that joins in mid-run."""


async def suffer(world: World, name: str, fate: FateModel, random: Random) -> None:
    """Consumes time until the machine is taken away; produces kills, restarts and outages of one worker."""
    rates = (fate.preemptions_per_h, fate.crashes_per_h, fate.outages_per_h)
    while (total := sum(rates)) > 0:
        await asyncio.sleep(random.expovariate(total / S_PER_H))
        which = random.choices(("preempted", "crashed", "cut_off"), rates)[0]
        world.events.emit(which, program=name)
        if which == "cut_off":
            world.links[name].cut = True
            await asyncio.sleep(random.expovariate(1 / fate.outage_s))
            world.links[name].cut = False
            continue
        if name not in world.working():
            return  # it drained and left
        if which == "preempted":
            await world.preempt(name)
            return
        await world.kill(name)
        await asyncio.sleep(fate.restart_s)
        if world.is_given_back(name):
            return
        if name not in world.working():
            world.start(name)


async def slow_down(world: World, name: str, spells: SlowSpells, random: Random) -> None:
    """Consumes time; produces spells in which the worker is slow."""
    while spells.per_h > 0:
        await asyncio.sleep(random.expovariate(spells.per_h / S_PER_H))
        world.slow(name, spells.factor)
        await asyncio.sleep(random.expovariate(1 / spells.mean_s))
        world.slow(name, 1.0)
