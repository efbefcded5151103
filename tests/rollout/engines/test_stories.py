"""The embedded engine in stories that nobody thought of: groups that come, are given up, and meet switches of weights.

Whatever shared the batch with it, a reply is what drawing its tokens one by one, from whole forward passes of the
weights that each token names, gives for the same seed.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TinyModel

from echo2.errors import EngineError
from echo2.rollout.engine import ActivationMode, Completion
from echo2.rollout.engines.sampling import uniforms
from echo2.rollout.engines.slots import GROWTH
from echo2.rollout.engines.transformers import TransformersEngine
from echo2.types import FinishReason, Policy, Sampling

CONTEXT = 64
TIE = 1e-4
"""A draw so near to the border between two tokens may fall to either, by rounding."""
PLACES = 12
"""Rows that the bound on memory admits at the least."""


class Story:
    """A random life of one engine, and what came of each group."""

    def __init__(self, tiny: TinyModel, random: Random) -> None:
        self.random = random
        self.models = [tiny.model, tiny.fresh(1), tiny.fresh(2)]
        self.folders = [tiny.snapshot(model, Policy(0, at)) for at, model in enumerate(self.models)]
        self.engine = TransformersEngine(tiny.folder, device="cpu", threads=1, dtype="float32")
        self.ended: list[tuple[list[int], Sampling, list[Completion]]] = []
        self.beginnings = [[random.randrange(CONTEXT) for _ in range(40)] for _ in range(2)]
        self.most_bytes = 0

    async def play(self, groups: int) -> None:
        await self.install(0, ActivationMode.DRAIN)
        self._watch()
        async with asyncio.TaskGroup() as tasks:
            for number in range(groups):
                task = tasks.create_task(self.group(number))
                if self.random.random() < 0.2:
                    tasks.create_task(self.give_up(task))
                if self.random.random() < 0.3:
                    await self.turns()
                if number == groups // 3 or number == 2 * groups // 3:
                    version = 1 if number == groups // 3 else 2
                    tasks.create_task(self.install(version, self.random.choice(list(ActivationMode))))
        assert self.engine._batch.rows == 0 and not self.engine._batch.running
        assert not self.engine._open and not self.engine._waiting
        assert not self.slots.blocks, "finished rows gave their memory back"
        prefixes = self.engine._batch._reader._prefixes  # type: ignore[attr-defined]
        assert prefixes.held_bytes <= prefixes._capacity
        await self.engine.close()

    @property
    def slots(self) -> Any:
        return self.engine._batch._reader._slots  # type: ignore[attr-defined]

    def _watch(self) -> None:
        """Bound the memory to a few rows, and see that it holds after each step."""
        batch = self.engine._batch
        per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their size, bytes of a number
        batch._states_bytes = PLACES * (CONTEXT + GROWTH) * per_token
        batch._reader._prefixes._capacity = 4 * CONTEXT * per_token  # type: ignore[attr-defined]
        step = batch.step

        def watched(policy: Policy) -> None:
            step(policy)
            # Free places are at most as many as rows; a row's place may be as wide as that of a longer one was.
            assert self.slots.nbytes <= 2 * batch._states_bytes * (CONTEXT + GROWTH) / GROWTH
            self.most_bytes = max(self.most_bytes, self.slots.nbytes)

        batch.step = watched  # type: ignore[method-assign]

    async def turns(self) -> None:
        for _ in range(self.random.randrange(30)):
            await asyncio.sleep(0)

    async def give_up(self, task: asyncio.Task[None]) -> None:
        await self.turns()
        task.cancel()

    async def install(self, version: int, mode: ActivationMode) -> None:
        policy = Policy(0, version)
        await self.turns()
        if self.engine.installed is not None and self.engine.installed > policy:
            return
        await self.engine.prefetch(policy, self.folders[version])
        await self.engine.activate(policy, mode)

    async def group(self, number: int) -> None:
        random = self.random
        length = random.choice([1, 1, 2, 9, 30, CONTEXT - 1])
        prompt = (random.choice(self.beginnings)[: random.choice([0, 12, 40])] + random.choices(range(CONTEXT), k=63))[
            :length
        ]
        sampling = Sampling(
            temperature=random.choice([0.6, 1.0, 1.4]),
            top_p=random.choice([1.0, 1.0, 0.7]),
            max_new_tokens=random.choice([1, 3, 12, 80]),
            seed=number,
            stop_token_ids=random.choice([(1000,), tuple(range(0, CONTEXT, 9))]),
        )
        heard: dict[int, Completion] = {}

        def hear(position: int, completion: Completion) -> None:
            assert position not in heard
            heard[position] = completion

        count = random.choice([1, 1, 2, 5, 12])
        try:
            replies = await self.engine.generate(prompt, sampling, count, hear)
        except EngineError as error:
            if not str(error).startswith("aborted: "):
                raise
            return
        assert [heard[position] for position in range(count)] == replies
        self.ended.append((prompt, sampling, replies))


@torch.inference_mode()
def assert_drawn_alone(models: list[Any], prompt: list[int], sampling: Sampling, row: int, reply: Completion) -> None:
    """Token by token, from one whole pass of each version's weights."""
    count = len(reply.token_ids)
    limit = min(sampling.max_new_tokens, CONTEXT - len(prompt))
    stopped = reply.token_ids[-1] in sampling.stop_token_ids
    assert (stopped or count == limit) and not set(reply.token_ids[:-1]) & set(sampling.stop_token_ids)
    assert reply.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    versions = reply.versions or (reply.policy_min.version,) * count
    assert (min(versions), max(versions)) == (reply.policy_min.version, reply.policy_max.version)
    assert list(versions) == sorted(versions) and reply.logprobs is not None
    whole = torch.tensor([[*prompt, *reply.token_ids]])
    logits = [model(input_ids=whole).logits[0, len(prompt) - 1 : -1].double() for model in models]
    draws = uniforms(sampling.seed, row, limit)
    for at, (token, version) in enumerate(zip(reply.token_ids, versions, strict=True)):
        mass = torch.softmax(logits[version][at] / sampling.temperature, -1)
        assert abs(reply.logprobs[at] - float(mass[token].log())) < 1e-3
        ordered, order = mass.sort(descending=True)
        kept = torch.zeros_like(mass).scatter_(
            0, order, ordered.masked_fill(ordered.cumsum(0) - ordered >= sampling.top_p, 0)
        )
        assert kept[token] > 0 or sampling.top_p < 1
        reached = kept.cumsum(0)
        target = float(draws[at]) * float(reached[-1])
        assert reached[token] - kept[token] - TIE <= target <= reached[token] + TIE


@pytest.mark.parametrize("kind", ["qwen3", "windowed"])
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_replies_do_not_depend_on_what_shares_the_engine_with_them(kind: str, seed: int) -> None:
    async def main(folder: Path) -> None:
        story = Story(TinyModel(kind, folder), Random(seed))
        await story.play(groups=24)
        assert story.ended and story.most_bytes
        for prompt, sampling, replies in story.ended:
            for row, reply in enumerate(replies):
                assert_drawn_alone(story.models, prompt, sampling, row, reply)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))


async def test_three_hundred_groups_at_once_are_what_each_is_alone(tiny: TinyModel) -> None:
    story = Story(tiny, Random(0))
    await story.install(0, ActivationMode.DRAIN)
    asked = [([number % CONTEXT], Sampling(1.0, 1.0, 2 + number % 3, number, (1000,))) for number in range(300)]
    groups = await asyncio.gather(*(story.engine.generate(prompt, sampling, 2) for prompt, sampling in asked))
    for number in range(0, 300, 37):
        prompt, sampling = asked[number]
        for row, reply in enumerate(groups[number]):
            assert_drawn_alone(story.models, prompt, sampling, row, reply)
    await story.engine.close()
