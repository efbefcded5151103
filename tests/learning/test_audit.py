"""The learner finds other weights, other temperatures and forged log-probs, and takes rounding for rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sampled import REPLY_TOKENS, sampled
from torch import Tensor
from trajectories import batch_of, learning_config, saved, some_batch, tiny_qwen3, trajectory

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import StreamedTensor, write_snapshot
from echo2.data.auditing import Audits
from echo2.learning.audit import draw
from echo2.learning.learner import TorchLearner
from echo2.transport.messages import BatchReply, RowAudit
from echo2.types import Policy, Segment, Trajectory, pack_logprobs, pack_tokens

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


def shifted(told: list[float]) -> list[float]:
    return [*told[1:], told[0]]


def constant(told: list[float]) -> list[float]:
    return [sum(told) / len(told)] * len(told)


def copied(told: list[float]) -> list[float]:
    return OTHERS[-len(told) :]


OTHERS = [-float(gap) for gap in np.random.default_rng(0).exponential(1.5, 64)]


@pytest.mark.parametrize("lie", [shifted, constant, copied])
async def test_forged_log_probs_are_caught_within_a_few_groups(lie: Any, folder: Path, tmp_path: Path) -> None:
    learner = opened(folder, tmp_path)
    worker = await published(learner)
    replies = sampled(worker, [[group % 32, 3, 5] for group in range(ROWS)])
    forged = [with_logprobs(record, lie(record.segments[1].logprob_values.tolist())) for record in replies]  # type: ignore[union-attr]
    caught = caught_after(await learner.audit(batch_of({group: [record] for group, record in enumerate(forged)})))
    assert caught is not None and caught[0] <= 12


def with_logprobs(record: Trajectory, told: list[float], **changes: Any) -> Trajectory:
    asked, reply = record.segments
    reply = msgspec.structs.replace(reply, logprobs=pack_logprobs(told), **changes)
    return msgspec.structs.replace(record, segments=(asked, reply))


async def test_an_old_groups_rows_under_a_newer_name_are_caught_once_the_policy_has_moved(
    folder: Path, tmp_path: Path
) -> None:
    learner = opened(folder, tmp_path, lr=0.1)
    before = await published(learner)
    for step in range(3):
        await learner.train_step(some_batch(step))
    await learner.write_snapshot(0)
    caught = caught_after(await learner.audit(batch_from(before, 3, version=3)))
    assert caught is not None and caught[0] <= 12


def spanning(old: Any, new: Any, told_by: Any = None) -> BatchReply:
    """Replies that version 0 began and version 1 goes on with from their middle."""
    prompts = [[group % 32, 3, 5] for group in range(ROWS)]
    begun = sampled(old, prompts)
    half = REPLY_TOKENS // 2
    prompts = [
        [*prompt, *record.segments[1].tokens[:half].tolist()] for prompt, record in zip(prompts, begun, strict=True)
    ]
    ended = sampled(new, prompts, told_by=told_by, seed=2)
    rows = {}
    for group, (first, rest) in enumerate(zip(begun, ended, strict=True)):
        one, other = (record.segments[1].logprob_values for record in (first, rest))
        assert one is not None and other is not None
        reply = Segment(
            pack_tokens([*first.segments[1].tokens[:half].tolist(), *rest.segments[1].tokens.tolist()]),
            True,
            pack_logprobs([*one[:half].tolist(), *other.tolist()]),
            pack_tokens([0] * half + [1] * REPLY_TOKENS),
        )
        segments = (first.segments[0], reply)
        rows[group] = [msgspec.structs.replace(first, segments=segments, policy_max=Policy(0, 1))]
    return batch_of(rows, 1)


async def test_of_a_reply_of_two_versions_each_is_compared_with_its_own(folder: Path, tmp_path: Path) -> None:
    """A worker that named two versions in every row was compared with neither."""
    learner = opened(folder, tmp_path, lr=0.1)
    old = await published(learner)
    await learner.train_step(some_batch(0))
    new = await published(learner)
    honest = spanning(old, new)
    seen = set()
    for digest in range(4):  # draws either version
        audits = await learner.audit(msgspec.structs.replace(honest, digest=str(digest)))
        assert len(audits) == ROWS and mean(audits) < 1e-5
        seen |= {audit.tokens for audit in audits}
        assert caught_after(audits * 50) is None
    assert seen == {REPLY_TOKENS // 2, REPLY_TOKENS}
    stranger = tiny_qwen3(seed=1).eval()
    for lie in (spanning(old, stranger), spanning(old, new, told_by=old)):
        worst = [caught_after(await learner.audit(msgspec.structs.replace(lie, digest=str(d))) * 2) for d in range(4)]
        assert min(caught[0] for caught in worst if caught is not None) <= 20


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_honest_workers_are_never_caught(scale: float, dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    """scale 30: near-deterministic replies. Whole rows, and rows of one token."""
    sharp = tiny_qwen3()
    with torch.no_grad():
        sharp.model.norm.weight.mul_(scale)  # logits that much wider
    learner = opened(saved(sharp, tmp_path / "sharp"), tmp_path)
    worker = (await published(learner)).to(dtype)
    judge = Audits(0.1)
    for seed in range(2):
        whole = sampled(worker, [[group % 32, 3, 5] for group in range(ROWS)], seed=seed)
        rows = {group: [record, first_token(record)] for group, record in enumerate(whole)}
        audits = await learner.audit(batch_of(rows, 0))
        assert audits
        for _ in range(60):
            for audit in audits:
                judge.add("w", [audit])
    assert not judge.take_convicted()


def first_token(record: Trajectory) -> Trajectory:
    told = record.segments[1].logprob_values
    assert told is not None
    return with_logprobs(record, told[:1].tolist(), token_ids=pack_tokens(record.segments[1].tokens[:1]))


async def test_rows_are_compared_by_a_learner_that_was_started_again_and_in_another_incarnation(
    folder: Path, tmp_path: Path
) -> None:
    learner = opened(folder, tmp_path)
    worker = await published(learner)
    await learner.save_checkpoint()
    again = opened(folder, tmp_path)
    assert mean(await again.audit(batch_from(worker))) < 1e-5
    await again.write_snapshot(1)
    rows = sampled(worker, [[group % 32, 3, 5] for group in range(ROWS)])
    named = [msgspec.structs.replace(r, policy_min=Policy(1, 0), policy_max=Policy(1, 0)) for r in rows]
    audits = await again.audit(batch_of({group: [record] for group, record in enumerate(named)}))
    assert len(audits) == ROWS and mean(audits) < 1e-5


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
    (found,) = await learner.audit(batch_of({0: [trajectory([1, 2], [3, 4], logprobs=[-8999.0, -500.0])]}))
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
    policy, rows = draw(batch, tmp_path, 6)
    assert policy == Policy(0, 0)
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
    share = np.mean([policy == Policy(0, 1) for policy in drawn])
    assert 0.05 < share < 0.25
