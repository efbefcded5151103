"""A worker that runs another model is found by the learner's audit and set aside; one that rounds in bf16 is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from desks import LEARNER, ONE, TWO, V0, attach, coordinator, generate, leased, publish
from safetensors.torch import load_file
from sampled import sampled
from trajectories import learning_config, saved, tiny_qwen3

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import StreamedTensor, write_snapshot
from echo2.coordinator.program import Coordinator
from echo2.errors import SetAside
from echo2.learning.learner import TorchLearner
from echo2.simulation.loop import run_virtual
from echo2.transport.messages import (
    AUDIT_EDGES_NATS,
    BatchReply,
    Heartbeat,
    Principal,
    ReportStep,
    RequestBatch,
    RowAudit,
    RowSubmission,
    SubmitGroup,
)
from echo2.types import Policy, RowStatus


def write(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]],
    aliases: Mapping[str, str],
    **rest: Any,
) -> Manifest:
    return write_snapshot({name: StreamedTensor(*tensor) for name, tensor in tensors.items()}, aliases, **rest)


async def installed(learner: TorchLearner) -> Any:
    _, snapshot = await learner.write_snapshot(0)
    model = tiny_qwen3().eval()
    model.load_state_dict(load_file(snapshot / "model.safetensors"), strict=False)
    return model.to(torch.bfloat16)


async def send_group(made: Coordinator, worker: Principal, model: Any, policy: Policy) -> None:
    grant = await leased(made, worker, policy)
    replies = sampled(model, [[1, 2, 3]] * len(grant.indices), policy.version, seed=grant.group_id)
    rows = tuple(
        RowSubmission(index, RowStatus.FINISHED, record=msgspec.Raw(msgspec.msgpack.encode(record)))
        for index, reply in zip(grant.indices, replies, strict=True)
        for record in [msgspec.structs.replace(reply, task=grant.prompt.task, prompt_id=grant.prompt.prompt_id)]
    )
    await made.handle(worker, SubmitGroup(grant.lease_id, grant.group_id, grant.attempt, rows))


async def test_a_worker_with_another_model_is_set_aside_and_one_that_rounds_is_not(tmp_path: Path) -> None:
    config = learning_config(saved(tiny_qwen3(), tmp_path / "model"), lr=1e-3)
    learner = TorchLearner.open(config, tmp_path / "run", "run", resume=False, write_snapshot=write)
    stranger = tiny_qwen3(seed=1).eval()
    made = await coordinator()
    epoch = await attach(made)
    for step in range(12):
        policy, honest = Policy(0, step), await installed(learner)
        if step:
            publish(made, policy)
        await send_group(made, ONE, honest, policy)
        await send_group(made, ONE if "two" in made.books.outcasts else TWO, stranger if step < 7 else honest, policy)
        batch = await made.handle(LEARNER, RequestBatch(epoch, step, 1.0))
        assert isinstance(batch, BatchReply)
        audits = await learner.audit(batch)
        assert len(audits) == 4
        stats = await learner.train_step(batch)
        await made.handle(LEARNER, ReportStep(epoch, step, 1.0, 0.0, dict(stats), audits))
        assert ("two" in made.books.outcasts) == (step >= 6), "seven groups convict"
    with pytest.raises(
        SetAside, match=r"worker two: its log-probs differ by 1.* nats a token from those of the weights"
    ):
        await made.handle(TWO, Heartbeat(V0, ()))
    assert "one" not in made.books.outcasts
    line = made.last_metrics
    assert line is not None
    one, two = line.audited["one"], line.audited["two"]
    assert (one.groups, two.groups) == (17, 7)
    assert one.mean_nats < 0.03 and one.p99_nats < 0.2 and one.beyond_share == 0.0
    assert two.mean_nats > 1.0 and two.beyond_share > 0.5
    assert line.mismatch_mean_nats == two.mean_nats


def off(group_id: int, index: int = 0) -> RowAudit:
    return RowAudit(group_id, index, (0,) * len(AUDIT_EDGES_NATS) + (100,), 600.0, 6.0, -100.0)


def test_a_repeated_report_and_rows_of_no_batch_count_for_nobody() -> None:
    async def main() -> None:
        made = await coordinator()
        epoch = await attach(made)
        await generate(made, 2)
        batch = await made.handle(LEARNER, RequestBatch(epoch, 0, 1.0))
        assert isinstance(batch, BatchReply)
        mine = batch.rows[0].group_id
        report = ReportStep(epoch, 0, 1.0, 0.0, {}, (off(mine), off(mine), off(999), off(mine, 77)))
        for _ in range(20):
            await made.handle(LEARNER, report)
        line = made.last_metrics
        assert line is not None
        assert {worker: (told.groups, told.tokens) for worker, told in line.audited.items()} == {"one": (1, 100)}
        assert len(made.books.outcasts) == 0

    run_virtual(main())


@pytest.mark.parametrize(("tolerance", "caught"), [(0.1, True), (0.0, False)])
def test_a_run_that_only_measures_sets_nobody_aside(tolerance: float, caught: bool) -> None:
    async def main() -> None:
        made = await coordinator(coordinator={"logprob_tolerance": tolerance})
        epoch = await attach(made)
        for step in range(5):
            if "one" in made.books.outcasts:
                break
            await generate(made, 2, installed=Policy(0, step))
            batch = await made.handle(LEARNER, RequestBatch(epoch, step, 1.0))
            assert isinstance(batch, BatchReply)
            groups = sorted({row.group_id for row in batch.rows})
            await made.handle(LEARNER, ReportStep(epoch, step, 1.0, 0.0, {}, tuple(map(off, groups))))
            publish(made, Policy(0, step + 1))
        assert ("one" in made.books.outcasts) == caught

    run_virtual(main())
