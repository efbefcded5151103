"""Versions that the learner's own engine runs: known as soon as they exist, and forked off when a crash takes them."""

from __future__ import annotations

from typing import Any

import pytest
from desks import LEARNER, ONE, attach, coordinator, generate, leased, publish, submitted

from echo2.coordinator.program import Coordinator
from echo2.errors import Refused
from echo2.simulation.loop import run_virtual
from echo2.simulation.memory import MemoryStore
from echo2.transport.messages import (
    AckCheckpoint,
    Attach,
    Attached,
    BatchReply,
    ReportStep,
    RequestBatch,
    RequestLease,
    StepAccepted,
)
from echo2.types import Policy, Verdict

SHARED: dict[str, Any] = {
    "run": {"mode": "sync", "steps": 10},
    "model": {"path": "tiny:qwen3", "snapshot_dtype": "float32"},
    "rollout": {"engine": "transformers", "rollouts_per_step": 4, "group_size": 2},
    "workers": {"local": 0, "shared_device": True},
}


async def step(made: Coordinator, epoch: int, number: int) -> str:
    """Generate under version ``number``, train on it; the batch's digest."""
    await generate(made, 2, installed=Policy(made.books.state.incarnation, number))
    batch = await made.handle(LEARNER, RequestBatch(epoch, number, 1.0))
    assert isinstance(batch, BatchReply)
    accepted = await made.handle(LEARNER, ReportStep(epoch, number, 1.0, 0.0, {}))
    assert isinstance(accepted, StepAccepted)
    return batch.digest


def test_a_version_is_leased_and_trained_on_before_it_is_durable_or_published() -> None:
    async def main() -> None:
        made = await coordinator(**SHARED)
        epoch = await attach(made)
        for number in range(3):
            await step(made, epoch, number)
        assert made.books.state.current == Policy(0, 0), "nothing was published since"
        grant = await leased(made, ONE, Policy(0, 3))
        assert await submitted(made, ONE, grant) == (Verdict.ACCEPTED,) * 2
        assert made.books.buffer.counts["trained"] == 12

    run_virtual(main())


def test_the_gate_counts_resident_versions_like_published_ones() -> None:
    async def main() -> None:
        made = await coordinator(**SHARED)
        epoch = await attach(made)
        await step(made, epoch, 0)
        for _ in range(2):
            await leased(made, ONE, Policy(0, 1))
        refused = await made.handle(ONE, RequestLease(Policy(0, 1), 0.1))
        assert "2 live groups of version 1 or older fill the 1 batches" in str(refused)

    run_virtual(main())


def test_nobody_may_name_a_version_that_is_not_there_yet() -> None:
    async def main() -> None:
        made = await coordinator(**SHARED)
        await attach(made)
        refused = await made.handle(ONE, RequestLease(Policy(0, 1), 0.1))
        assert "not of this run's published history" in str(refused)

    run_virtual(main())


def test_without_a_shared_device_a_version_is_known_when_it_is_published() -> None:
    async def main() -> None:
        made = await coordinator(run={"mode": "sync", "steps": 10})
        epoch = await attach(made)
        await step(made, epoch, 0)
        assert made.books.state.known == made.books.state.published == [Policy(0, 0)]
        refused = await made.handle(ONE, RequestLease(Policy(0, 1), 0.1))
        assert "not of this run's published history" in str(refused)

    run_virtual(main())


def test_what_a_crash_took_away_is_forked_off_and_what_was_durable_goes_on() -> None:
    """Step 3 ran and version 3 generated; its checkpoint was not there yet when the process died."""

    async def main() -> None:
        store = MemoryStore(0.0)
        made = await coordinator(store, **SHARED)
        epoch = await attach(made)
        digests = [await step(made, epoch, number) for number in range(2)]
        await made.handle(LEARNER, AckCheckpoint(epoch, 2))
        publish(made, Policy(0, 2))
        await step(made, epoch, 2)
        grant = await leased(made, ONE, Policy(0, 3))
        await submitted(made, ONE, grant)
        late = await leased(made, ONE, Policy(0, 3))

        made = await coordinator(store, **SHARED)
        attached = await made.handle(LEARNER, Attach("run", 2, digests[1], "initial", ()))
        assert isinstance(attached, Attached)
        assert (attached.policy, attached.publish_needed) == (Policy(1, 2), True)
        assert made.books.state.known == [Policy(0, 0), Policy(0, 1), Policy(0, 2), Policy(1, 2)]
        refused = await made.handle(ONE, RequestLease(Policy(0, 3), 0.1))
        assert "not of this run's published history" in str(refused)
        assert Verdict.ACCEPTED not in await submitted(made, ONE, late)
        # The batch of the lost step was of version 2, which survived: it is replayed, and the run goes on.
        replayed = await made.handle(LEARNER, RequestBatch(attached.epoch, 2, 1.0))
        assert isinstance(replayed, BatchReply)
        accepted = await made.handle(LEARNER, ReportStep(attached.epoch, 2, 1.0, 0.0, {}))
        assert isinstance(accepted, StepAccepted)
        assert accepted.policy == Policy(1, 3)
        await step(made, attached.epoch, 3)

    run_virtual(main())


def test_a_published_version_stays_a_promise() -> None:
    async def main() -> None:
        made = await coordinator(**SHARED)
        epoch = await attach(made)
        digests = [await step(made, epoch, number) for number in range(2)]
        await made.handle(LEARNER, AckCheckpoint(epoch, 2))
        publish(made, Policy(0, 2))
        with pytest.raises(Refused, match="below published version"):
            await made.handle(LEARNER, Attach("run", 1, digests[0], "initial", ()))

    run_virtual(main())


def test_an_evaluation_is_of_the_version_that_was_due_and_does_not_wait_for_its_publish() -> None:
    async def main() -> None:
        made = await coordinator(**SHARED, eval={"every_steps": 2, "prompts": 1})
        epoch = await attach(made)
        for number in range(2):
            await step(made, epoch, number)
        grant = await leased(made, ONE, Policy(0, 2))
        assert (grant.purpose, grant.policy) == ("eval", Policy(0, 2))

    run_virtual(main())
