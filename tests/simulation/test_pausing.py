"""Engines that stand still while a snapshot is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from echo2.rollout.engine import ActivationMode
from echo2.simulation.loop import run_virtual
from echo2.simulation.pausing import PausingEngine
from echo2.types import Policy, Sampling

FOLDER = Path("snapshot")
GROUP_S = 10.0


async def installed(activation_s: float = 0.0) -> PausingEngine:
    engine = PausingEngine(duration=lambda *_: GROUP_S, activation_s=activation_s)
    await engine.prefetch(Policy(0, 0), FOLDER)
    await engine.activate(Policy(0, 0))
    return engine


def took_s(work: Callable[[], Awaitable[object]]) -> float:
    async def timed() -> float:
        await work()
        return asyncio.get_running_loop().time()

    return run_virtual(timed(), until_s=1000.0)


async def generate(engine: PausingEngine) -> None:
    await engine.generate([1, 2, 3], Sampling(1.0, 1.0, 16, seed=1), 2)


def test_a_generation_takes_longer_by_the_time_in_which_a_snapshot_travels() -> None:
    async def work() -> None:
        engine = await installed()
        running = asyncio.ensure_future(generate(engine))
        await asyncio.sleep(4.0)
        engine.published(Policy(0, 2))
        await asyncio.sleep(25.0)
        await engine.prefetch(Policy(0, 2), FOLDER)
        await running

    assert took_s(work) == GROUP_S + 25.0


def test_a_generation_begun_while_a_snapshot_travels_begins_with_it() -> None:
    async def work() -> None:
        engine = await installed()
        engine.published(Policy(0, 2))
        running = asyncio.ensure_future(generate(engine))
        await asyncio.sleep(5.0)
        await engine.prefetch(Policy(0, 2), FOLDER)
        await running

    assert took_s(work) == 5.0 + GROUP_S


def test_nothing_stands_still_when_nothing_travels() -> None:
    async def work() -> None:
        engine = await installed()
        engine.published(Policy(0, 0))
        await generate(engine)

    assert took_s(work) == GROUP_S


def test_a_worker_that_has_no_snapshot_yet_waits_for_none() -> None:
    async def work() -> None:
        engine = PausingEngine(duration=lambda *_: GROUP_S, activation_s=2.0)
        engine.published(Policy(0, 2))
        await engine.prefetch(Policy(0, 0), FOLDER)
        await engine.activate(Policy(0, 0))

    assert took_s(work) == 2.0


def test_a_publish_during_an_activation_does_not_keep_it_from_its_end() -> None:
    """It waits for what runs, and nobody brings the newer snapshot before it is done."""

    async def work() -> None:
        engine = await installed(activation_s=3.0)
        begun_s = asyncio.get_running_loop().time()
        running = asyncio.ensure_future(generate(engine))
        await asyncio.sleep(1.0)
        await engine.prefetch(Policy(0, 2), FOLDER)
        switching = asyncio.ensure_future(engine.activate(Policy(0, 2), ActivationMode.DRAIN))
        await asyncio.sleep(1.0)
        engine.published(Policy(0, 4))
        await switching
        assert asyncio.get_running_loop().time() - begun_s == GROUP_S + 3.0
        await running

    took_s(work)
