"""A learner that trains real steps on the weights that an engine generates with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import reference_logprobs
from trajectories import learning_config, saved, some_batch, tiny_qwen3

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import StreamedTensor, write_snapshot
from echo2.learner.sharing import SharingLearner, shared_engine
from echo2.learning.learner import TorchLearner
from echo2.rollout.engines.shared import SharedEngine
from echo2.types import Policy, Sampling

PROMPT = [5, 6, 7, 8]


def write(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]],
    aliases: Mapping[str, str],
    **rest: Any,
) -> Manifest:
    return write_snapshot({name: StreamedTensor(*tensor) for name, tensor in tensors.items()}, aliases, **rest)


@asynccontextmanager
async def sharing(
    folder: Path, model: Any, **learning: Any
) -> AsyncIterator[tuple[SharingLearner, TorchLearner, SharedEngine]]:
    model_dir = saved(model, folder / "model")
    config = learning_config(model_dir, **learning)
    own = TorchLearner.open(config, folder / "run", "run-1", resume=False, write_snapshot=write)
    engine = shared_engine(own, model_dir, threads=1)
    try:
        yield SharingLearner(own, engine), own, engine
    finally:
        await engine.close()


def places(model: Any) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("model", [tiny_qwen3(), tiny_qwen3(tied=False)], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [False, True])
async def test_steps_and_audits_leave_one_copy_whose_newest_version_samples(
    model: Any, checkpointing: bool, tmp_path: Path
) -> None:
    async with sharing(tmp_path, model, activation_checkpointing=checkpointing) as (learner, own, engine):
        frame, before = engine._model, places(own.policy.model)
        engine.settle(Policy(0, 0))
        for version in range(3):
            await learner.write_snapshot(0)  # of the version that the batch names, so there is something to audit
            await learner.audit(some_batch(version))
            statistics = await learner.train_step(some_batch(version))
            assert statistics["grad_norm"] > 0
            engine.settle(Policy(0, version + 1))
            assert places(frame) == places(own.policy.model) == before
            (reply,) = await engine.generate(PROMPT, Sampling(1.0, 1.0, 8, seed=version), 1)
            assert reply.policy_min == reply.policy_max == Policy(0, version + 1)
            truth = reference_logprobs(own.policy.model, PROMPT, reply.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(reply.logprobs), truth, atol=1e-4, rtol=0)


async def test_a_frozen_step_is_written_while_the_engine_generates(tmp_path: Path) -> None:
    async with sharing(tmp_path, tiny_qwen3()) as (learner, own, engine):
        engine.settle(Policy(0, 0))
        await learner.train_step(some_batch())
        engine.settle(Policy(0, 1))
        frozen = await learner.freeze()
        assert (await engine.generate(PROMPT, Sampling(1.0, 1.0, 4, seed=1), 1))[0].policy_max == Policy(0, 1)
        await learner.save_checkpoint(frozen)
        manifest, _ = await learner.write_snapshot(0, frozen)
        assert manifest.policy == Policy(0, 1)
        assert frozen.step == own.step == learner.step == 1


async def test_training_alone_gives_the_same_bits_as_training_in_turns(tmp_path: Path) -> None:
    """The engine attends in its own way, and changes nothing of how the learner does."""
    async with sharing(tmp_path / "shared", tiny_qwen3()) as (learner, own, engine):
        alone = TorchLearner.open(
            learning_config(tmp_path / "shared" / "model"), tmp_path / "alone", "run-1", resume=False,
            write_snapshot=write,
        )  # fmt: skip
        engine.settle(Policy(0, 0))
        for step in range(2):
            await engine.generate(PROMPT, Sampling(1.0, 1.0, 8, seed=step), 4)
            await learner.train_step(some_batch(step))
            engine.settle(Policy(0, step + 1))
            await alone.train_step(some_batch(step))
        mine, theirs = own.policy.model.state_dict(), alone.policy.model.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
