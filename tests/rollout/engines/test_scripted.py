from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from echo2.data.chat import ByteChat
from echo2.errors import EngineError
from echo2.rollout.engine import ActivationMode, Completion
from echo2.rollout.engines import build_engine
from echo2.rollout.engines.scripted import ScriptedEngine
from echo2.types import FinishReason, Policy, Sampling

CHAT = ByteChat()
ASK = CHAT.render([{"role": "user", "content": "What is 12+30?"}], thinking=False)
NOWHERE = Path("nowhere")


def sampling(seed: int = 0, max_new_tokens: int = 16) -> Sampling:
    return Sampling(1.0, 1.0, max_new_tokens, seed)


async def serving(version: int, engine: ScriptedEngine | None = None) -> ScriptedEngine:
    engine = engine or ScriptedEngine()
    await engine.prefetch(Policy(0, version), NOWHERE)
    await engine.activate(Policy(0, version))
    return engine


def right(group: list[Completion]) -> int:
    return sum(CHAT.decode(completion.token_ids) == "42" for completion in group)


async def test_newer_policies_are_right_more_often_and_seeds_fix_replies() -> None:
    old, new = await serving(0), await serving(10)
    assert right(await old.generate(ASK, sampling(), 200)) < 80 < 120 < right(await new.generate(ASK, sampling(), 200))
    assert await old.generate(ASK, sampling(5), 4) == await old.generate(ASK, sampling(5), 4)


async def test_a_reply_ends_with_its_end_token_unless_it_is_cut() -> None:
    engine = await serving(0)
    (whole,) = await engine.generate(ASK, sampling(), 1)
    (cut,) = await engine.generate(ASK, sampling(max_new_tokens=1), 1)
    assert (whole.token_ids[-1], whole.finish_reason) == (CHAT.END, FinishReason.STOP)
    assert (len(cut.token_ids), cut.finish_reason) == (1, FinishReason.LENGTH)


class Gate:
    """A ``sleep`` that lasts until it is opened."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.open = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds:
            self.waiting.set()
            await self.open.wait()


@pytest.mark.parametrize("mode", list(ActivationMode))
async def test_a_switch_under_way_does_what_its_mode_says(mode: ActivationMode) -> None:
    gate = Gate()

    def lasting(prompt_tokens: int, n: int, random: Random) -> float:
        return 5.0

    engine = await serving(0, ScriptedEngine(duration=lasting, sleep=gate.sleep))
    await engine.prefetch(Policy(0, 1), NOWHERE)

    async def generate() -> list[Completion] | str:
        try:
            return await engine.generate(ASK, sampling(), 2)
        except EngineError as error:
            return str(error)

    async with asyncio.TaskGroup() as group:
        running = group.create_task(generate())
        await gate.waiting.wait()
        switching = group.create_task(engine.activate(Policy(0, 1), mode))
        for _ in range(10):
            await asyncio.sleep(0)
        assert switching.done() == (mode is not ActivationMode.DRAIN)
        gate.open.set()
    outcome = running.result()
    assert engine.installed == Policy(0, 1)
    if mode is ActivationMode.ABORT:
        assert str(outcome).startswith("aborted")
        return
    assert isinstance(outcome, list)
    newest = Policy(0, 0) if mode is ActivationMode.DRAIN else Policy(0, 1)
    assert {(c.policy_min, c.policy_max) for c in outcome} == {(Policy(0, 0), newest)}


async def test_nothing_runs_before_an_install_and_only_prefetched_policies_are_installed() -> None:
    engine = build_engine("scripted", None, device="auto", threads=0, dtype="bfloat16")
    with pytest.raises(EngineError, match="must be installed"):
        await engine.generate(ASK, sampling(), 1)
    with pytest.raises(EngineError, match="must be prefetched"):
        await engine.activate(Policy(0, 0))
    assert engine.installed is None
    await engine.close()


def test_the_scripted_engine_needs_no_torch() -> None:
    program = "import sys, echo2.rollout.episode, echo2.rollout.engines.scripted; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50, env=environment
    )
    assert found.stdout.strip() == "False"
