"""The learner finds other weights, other temperatures and forged log-probs, and takes rounding for rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sampled import sampled
from torch import Tensor
from trajectories import batch_of, learning_config, saved, some_batch, tiny_qwen3, trajectory

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import StreamedTensor, write_snapshot
from echo2.data.auditing import Audits
from echo2.learning.audit import draw
from echo2.learning.learner import TorchLearner
from echo2.transport.messages import BatchReply, RowAudit
from echo2.types import Policy

ROWS = 24


def write(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]],
    aliases: Mapping[str, str],
    **rest: Any,
) -> Manifest:
    return write_snapshot({name: StreamedTensor(*tensor) for name, tensor in tensors.items()}, aliases, **rest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tiny_qwen3(), tmp_path / "model")


def opened(folder: Path, run_dir: Path, rows: int = ROWS, **more: Any) -> TorchLearner:
    config = learning_config(folder, audit_rows=rows, **more)
    return TorchLearner.open(config, run_dir, "run-1", resume=True, write_snapshot=write)


async def published(learner: TorchLearner) -> Any:
    """A worker's model with the newest version's snapshot installed, in float32."""
    _, snapshot = await learner.write_snapshot(0)
    model = tiny_qwen3().eval()
    model.load_state_dict({k: v.float() for k, v in load_file(snapshot / "model.safetensors").items()}, strict=False)
    return model


def batch_from(model: Any, step: int = 0, **how: Any) -> BatchReply:
    """A row of each of ``ROWS`` groups."""
    replies = sampled(model, [[group % 32, 3, 5] for group in range(ROWS)], **how)
    return batch_of({group: [record] for group, record in enumerate(replies)}, step)


def mean(audits: tuple[RowAudit, ...]) -> float:
    return sum(audit.total for audit in audits) / sum(audit.tokens for audit in audits)


def caught_after(audits: tuple[RowAudit, ...]) -> tuple[int, str] | None:
    """Groups until the worker that sent them is found out, and why."""
    judge = Audits(0.1)
    for count, audit in enumerate(audits, start=1):
        judge.add("w", [audit])
        if found := judge.take_convicted():
            return count, found["w"]
    return None


def weights(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in learner._policy.model.state_dict().items()}


async def test_rows_are_compared_with_the_version_they_name_however_stale_they_are(
    folder: Path, tmp_path: Path
) -> None:
    learner = opened(folder, tmp_path, lr=0.1)
    worker = await published(learner)
    batch = batch_from(worker, 3)
    for step in range(3):
        await learner.train_step(some_batch(step))
    before = weights(learner)
    audits = await learner.audit(batch)
    assert len(audits) == ROWS
    assert mean(audits) < 1e-5, "the same bits, computed the same way"
    after = weights(learner)
    assert all(torch.equal(before[name], after[name]) for name in before), "its own weights are back"
    # Weights three steps on would not have served: what they say is far from what version 0 said.
    await learner.write_snapshot(0)
    assert mean(await learner.audit(batch_from(worker, 3, version=3))) > 0.1


async def test_bf16_is_not_taken_for_another_model(folder: Path, tmp_path: Path) -> None:
    learner = opened(folder, tmp_path)
    worker = (await published(learner)).to(torch.bfloat16)
    audits = await learner.audit(batch_from(worker))
    assert 1e-4 < mean(audits) < 0.05
    assert caught_after(audits * 50) is None


async def test_another_model_is_caught_within_a_few_groups(folder: Path, tmp_path: Path) -> None:
    learner = opened(folder, tmp_path)
    await published(learner)
    audits = await learner.audit(batch_from(tiny_qwen3(seed=1).eval()))
    caught = caught_after(audits)
    assert caught is not None and caught[0] == 7
    assert "nats a token from those of the weights that it names" in caught[1]


async def test_another_temperature_than_stated_is_caught(folder: Path, tmp_path: Path) -> None:
    learner = opened(folder, tmp_path)
    worker = await published(learner)
    audits = await learner.audit(batch_from(worker, temperature=0.5))
    caught = caught_after(audits)
    assert caught is not None and caught[0] <= 10


async def test_weights_cut_to_four_bits_are_caught(folder: Path, tmp_path: Path) -> None:
    learner = opened(folder, tmp_path)
    worker = await published(learner)
    with torch.no_grad():
        for parameter in worker.parameters():
            if parameter.ndim > 1:
                step = parameter.abs().max() / 7
                parameter.copy_((parameter / step).round() * step)
    caught = caught_after(await learner.audit(batch_from(worker)))
    assert caught is not None and caught[0] <= 10


@pytest.mark.parametrize("lie", ["temperature", "model"])
async def test_right_log_probs_of_tokens_drawn_otherwise_are_found_by_how_likely_the_tokens_are(
    lie: str, folder: Path, tmp_path: Path
) -> None:
    learner = opened(folder, tmp_path)
    worker = await published(learner)
    if lie == "temperature":
        batch = batch_from(worker, temperature=0.5, told_by=worker, told_temperature=1.0)
    else:
        batch = batch_from(tiny_qwen3(seed=1).eval(), told_by=worker)
    audits = await learner.audit(batch)
    honest = await learner.audit(batch_from(worker))
    assert mean(audits) < 1e-5
    caught = caught_after(audits * 50)
    assert caught is not None and "do not draw so" in caught[1]
    assert caught_after(honest * 50) is None


async def test_what_cannot_be_compared_is_evidence_of_nothing(folder: Path, tmp_path: Path) -> None:
    learner = opened(folder, tmp_path)
    lone = [-3.0, -3.0]
    rows = {
        0: [trajectory([1, 2], [3, 4])],  # no log-probs
        1: [trajectory([1, 2], [3, 4], logprobs=lone, version=9)],  # a version that is not here
        2: [trajectory([1, 2], [3, 4], logprobs=lone, policy_max=Policy(0, 1))],  # two versions
        3: [trajectory([1, 2], [3, 40], logprobs=lone)],  # no token of this vocabulary
    }
    assert await learner.audit(batch_of(rows)) == (), "nothing is published yet"
    await published(learner)
    assert await learner.audit(batch_of(rows)) == ()
    assert len(await learner.audit(batch_of(rows | {4: [trajectory([1, 2], [3, 4], logprobs=lone)]}))) == 1


async def test_a_damaged_snapshot_stops_neither_the_step_nor_changes_the_weights(folder: Path, tmp_path: Path) -> None:
    learner = opened(folder, tmp_path)
    worker = await published(learner)
    batch, before = batch_from(worker), weights(learner)
    place = tmp_path / "learner" / "snapshots" / "0.0" / "model.safetensors"
    place.write_bytes(place.read_bytes()[:100])
    assert await learner.audit(batch) == ()
    save_file({"other": torch.zeros(1)}, place)
    assert await learner.audit(batch) == ()
    assert all(torch.equal(before[name], value) for name, value in weights(learner).items())


async def test_absurd_log_probs_make_a_report_that_can_still_be_sent(folder: Path, tmp_path: Path) -> None:
    learner = opened(folder, tmp_path)
    await published(learner)
    (found,) = await learner.audit(batch_of({0: [trajectory([1, 2], [3, 4], logprobs=[-3e38, -1e30])]}))
    assert (found.total, found.bins[-1]) == (200.0, 2)


async def test_an_audited_run_has_the_bits_of_one_that_is_not(folder: Path, tmp_path: Path) -> None:
    one, other = opened(folder, tmp_path / "1"), opened(folder, tmp_path / "2", rows=0)
    for step in range(2):
        for learner in (one, other):
            await learner.write_snapshot(0)
            audits = await learner.audit(some_batch(step))
            assert len(audits) == (12 if learner is one else 0)
            await learner.train_step(some_batch(step))
    left, right = weights(one), weights(other)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_sample_is_spread_over_the_groups_and_the_same_when_the_step_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "0.0").mkdir()
    (tmp_path / "0.0" / "model.safetensors").touch()
    batch = some_batch(groups=4)
    folder, rows = draw(batch, tmp_path, 6)
    assert folder == tmp_path / "0.0"
    assert sorted({row.group_id for row in rows[:4]}) == [0, 1, 2, 3] and len(rows) == 6
    assert draw(deepcopy(batch), tmp_path, 6)[1] == rows
    drawn = {row.index for step in range(20) for row in draw(BatchReply(0, str(step), batch.rows), tmp_path, 4)[1]}
    assert drawn == {0, 1, 2}


def test_a_version_with_few_rows_is_drawn_too(tmp_path: Path) -> None:
    for version in (0, 1):
        (tmp_path / f"0.{version}").mkdir()
        (tmp_path / f"0.{version}" / "model.safetensors").touch()
    groups = {g: [trajectory([1], [2], logprobs=[-1.0], version=int(g == 0))] for g in range(8)}
    rows = batch_of(groups).rows
    drawn = [draw(BatchReply(0, str(at), rows), tmp_path, 8)[0] for at in range(200)]
    share = np.mean([folder == tmp_path / "0.1" for folder in drawn])
    assert 0.05 < share < 0.25
