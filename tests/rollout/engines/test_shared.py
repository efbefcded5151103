"""An engine on tensors that somebody else changes in place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tiny_models import TinyModel, reference_logprobs

from echo2.errors import EngineError
from echo2.rollout.engine import Completion
from echo2.rollout.engines.shared import SharedEngine
from echo2.types import Policy, Sampling

V0, V1 = Policy(0, 0), Policy(0, 1)
PROMPT = [5, 6, 7, 8, 9]


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 10, "seed": 3, **changes})


def engine_on(tiny: TinyModel, computes_in: torch.dtype = torch.float32) -> SharedEngine:
    return SharedEngine(tiny.folder, tiny.model.state_dict(), computes_in=computes_in, threads=1)


@asynccontextmanager
async def serving(tiny: TinyModel, computes_in: torch.dtype = torch.float32) -> AsyncIterator[SharedEngine]:
    engine = engine_on(tiny, computes_in)
    engine.settle(V0)
    try:
        yield engine
    finally:
        await engine.close()


def train(tiny: TinyModel) -> None:
    """What an optimizer does: another value in the same memory."""
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            parameter.add_(0.1 * torch.sign(parameter))


def assert_of(tiny: TinyModel, completion: Completion, policy: Policy, atol: float = 1e-4) -> None:
    """Sampled by the weights as they are now, and named so."""
    assert (completion.policy_min, completion.policy_max) == (policy, policy)
    expected = reference_logprobs(tiny.model, PROMPT, completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("tiny", ["qwen3", "llama", "gpt2", "convolutional"], indirect=True)
async def test_there_is_one_copy_of_the_weights_and_its_version_is_what_samples(tiny: TinyModel) -> None:
    theirs = {name: value.data_ptr() for name, value in tiny.model.state_dict().items()}
    attention = tiny.model.config._attn_implementation
    async with serving(tiny) as engine:
        model: Any = engine._model
        assert {name: value.data_ptr() for name, value in model.state_dict().items()} == theirs
        assert {value.data_ptr() for value in model.parameters()} <= set(theirs.values())
        (before,) = await engine.generate(PROMPT, sampling(), 1)
        assert_of(tiny, before, V0)
        await engine.lend()
        train(tiny)
        engine.settle(V1)
        (after,) = await engine.generate(PROMPT, sampling(), 1)
        assert_of(tiny, after, V1)
    assert tiny.model.config._attn_implementation == attention, "the learner attends as it did"
    assert all(value.requires_grad for value in tiny.model.parameters())


async def test_what_has_begun_ends_under_its_version_and_what_has_not_waits_for_the_next(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        begun = asyncio.create_task(engine.generate(PROMPT, sampling(max_new_tokens=40), 4))
        while not engine._batch.rows:
            await asyncio.sleep(0)
        await engine.lend()
        assert not engine._batch.running
        for completion in await begun:
            assert_of(tiny, completion, V0)
        later = asyncio.create_task(engine.generate(PROMPT, sampling(), 2))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not engine._batch.rows, "nothing is sampled while the learner has the weights"
        train(tiny)
        await engine.lend()  # an audit and a step borrow once
        engine.settle(V1)
        for completion in await later:
            assert_of(tiny, completion, V1)


async def test_a_prompt_that_was_known_is_read_anew_after_a_step(tiny: TinyModel) -> None:
    """The prefix of a conversation is kept between two calls, not between two versions."""
    async with serving(tiny) as engine:
        await engine.generate(PROMPT, sampling(), 1)
        await engine.lend()
        train(tiny)
        engine.settle(V1)
        (after,) = await engine.generate(PROMPT, sampling(), 1)
        assert_of(tiny, after, V1)


async def test_in_bfloat16_the_weights_stay_float32_and_one_copy(tiny: TinyModel) -> None:
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            parameter.mul_(0.25)  # as they were: rounding grows with the logits
    async with serving(tiny, torch.bfloat16) as engine:
        assert engine.compute_dtype is torch.bfloat16
        group = await engine.generate(PROMPT, sampling(), 8)
        for completion in group:
            assert_of(tiny, completion, V0, atol=0.05)
        exact = [reference_logprobs(tiny.model, PROMPT, one.token_ids, 1.0) for one in group]
        told = [torch.tensor(one.logprobs) for one in group]
        assert any(not torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(exact, told, strict=True))
        assert {value.dtype for value in engine._model.parameters()} == {torch.float32}


async def test_versions_are_told_and_no_snapshot_can_take_their_place(tiny: TinyModel) -> None:
    engine = engine_on(tiny)
    with pytest.raises(EngineError, match="must be installed"):
        await engine.generate(PROMPT, sampling(), 1)
    waiting = asyncio.create_task(engine.settled(None))
    await engine.lend()  # a resume trains before anything is named
    engine.settle(V0)
    assert await waiting == V0
    newer = asyncio.create_task(engine.settled(V0))
    await engine.lend()
    engine.settle(V1)
    assert await newer == V1 == engine.installed
    with pytest.raises(EngineError, match="the weights are the learner's"):
        await engine.prefetch(V0, tiny.folder)
    with pytest.raises(EngineError, match=r"the weights are 0\.1"):
        await engine.activate(V0)
    await engine.activate(V1)
    await engine.close()


async def test_an_engine_whose_weights_were_not_given_back_can_be_closed(tiny: TinyModel) -> None:
    engine = engine_on(tiny)
    engine.settle(V0)
    await engine.lend()
    waiting = asyncio.create_task(engine.generate(PROMPT, sampling(), 1))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="was closed"):
        await waiting
    await engine.lend()  # nobody is left to wait for
