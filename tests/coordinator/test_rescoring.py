"""A worker whose rewards are not what its replies score is set aside; an honest one never is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from building import trajectory
from desks import LEARNER, ONE, TWO, V0, attach, coordinator, leased, publish

from echo2.config.sections import TaskSection
from echo2.coordinator.program import Coordinator
from echo2.coordinator.rescoring import NoScore
from echo2.data.chat import ByteChat
from echo2.data.registry import load_tasks
from echo2.data.task import Score
from echo2.errors import SetAside
from echo2.simulation.loop import run_virtual
from echo2.simulation.memory import MemoryStore
from echo2.simulation.record import RecordedEvents
from echo2.simulation.scoring import ScoredAtOnce
from echo2.transport.messages import (
    PROTOCOL_VERSION,
    Enrol,
    GetStatus,
    Heartbeat,
    LeaseGrant,
    Principal,
    ReportStep,
    RequestBatch,
    RequestLease,
    Role,
    RowSubmission,
    RunStatus,
    SubmitGroup,
    SubmitVerdicts,
)
from echo2.types import Prompt, RowState, RowStatus, Verdict
from echo2.version import VERSION

ALL = {"coordinator": {"rescored_share": 1.0}}
PEOPLE = Principal(Role.OPERATOR, "people")
TASKS = load_tasks([TaskSection(name="arithmetic")])


class Odd:
    """Scores as told."""

    def __init__(self, *scores: Score | NoScore) -> None:
        self._scores = itertools.cycle(scores)

    async def score(self, prompt: Prompt, reply: bytes) -> Score:
        score = next(self._scores)
        if isinstance(score, NoScore):
            raise score
        return score


def reply(grant: LeaseGrant, *, right: bool, told: float | None = None) -> msgspec.Raw:
    """A right or wrong reply; ``told``: the reward that the worker claims, the true one by default."""
    text = str(grant.prompt.content["gold"]) if right else "no idea"
    reward = (1.0 if right else 0.0) if told is None else told
    record = trajectory(grant.prompt, grant.policy, reward, reply=tuple(ByteChat().encode_reply(text)))
    status = "correct" if reward else "no_answer"
    return msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(record, omega={"status": status})))


async def send(
    made: Coordinator, worker: Principal, grant: LeaseGrant, told: float | None = None
) -> tuple[Verdict, ...]:
    """A right reply, and wrong ones for which ``told`` is claimed."""
    rows = tuple(
        RowSubmission(index, RowStatus.FINISHED, record=reply(grant, right=at == 0, told=None if at == 0 else told))
        for at, index in enumerate(grant.indices)
    )
    answer = await made.handle(worker, SubmitGroup(grant.lease_id, grant.group_id, grant.attempt, rows))
    assert isinstance(answer, SubmitVerdicts)
    return answer.verdicts


async def watching(made: Coordinator, story: Callable[[Coordinator], Coroutine[Any, Any, None]]) -> None:
    """The story, while the coordinator's loops run."""
    running = asyncio.ensure_future(made.run())
    try:
        await story(made)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def kinds(made: Coordinator, kind: str) -> list[dict[str, Any]]:
    assert isinstance(made.events, RecordedEvents)
    return [event for event in made.events.events if event["kind"] == kind]


def counts_add_up(made: Coordinator) -> bool:
    return made.books.buffer.generated == sum(made.books.buffer.counts[state] for state in RowState)


def test_an_honest_worker_is_never_set_aside_and_every_reward_of_it_was_checked() -> None:
    async def story(made: Coordinator) -> None:
        await attach(made)
        for _ in range(4):
            await send(made, ONE, await leased(made, ONE))
        await asyncio.sleep(1.0)
        assert (made.books.state.rescored, made.books.state.rescored_differing) == (8, 0)
        assert len(made.books.outcasts) == 0

    async def main() -> None:
        await watching(await coordinator(scorer=ScoredAtOnce(TASKS), **ALL), story)

    run_virtual(main())


def test_a_worker_that_adds_reward_is_set_aside_with_the_reason_and_its_rows_are_not_trained() -> None:
    async def story(made: Coordinator) -> None:
        await attach(made)
        await send(made, TWO, await leased(made, TWO))
        running = await leased(made, ONE)
        lie = await leased(made, ONE)
        await send(made, ONE, lie, told=1.0)
        await asyncio.sleep(1.0)
        assert "one" in made.books.outcasts and "two" not in made.books.outcasts
        (differs,) = kinds(made, "reward_differs")
        assert (differs["told"], differs["found"], differs["worker"]) == ("1 (correct)", "0 (no_answer)", "one")
        # What it had is in nobody's batch, and others get its groups.
        buffer = made.books.buffer
        assert (buffer.counts[RowState.BUFFERED], buffer.counts[RowState.REFUSED]) == (2, 2)
        assert buffer.refused_by[Verdict.DISTRUSTED] == 2
        assert {group.group_id for group in buffer.awaiting_lease()} == {running.group_id, lie.group_id}
        assert counts_add_up(made)
        for group_id in (running.group_id, lie.group_id):
            grant = await leased(made, TWO)
            assert grant.group_id == group_id
            assert set(await send(made, TWO, grant)) == {Verdict.ACCEPTED}
        # It is refused whatever it asks, and people are told.
        for request in (Heartbeat(V0, ()), RequestLease(V0, 1.0), SubmitGroup(lie.lease_id, 0, 1, ())):
            with pytest.raises(SetAside, match=r"worker one: it sent the reward 1 \(correct\) for a reply to arith"):
                await made.handle(ONE, request)
        told = await made.handle(PEOPLE, GetStatus())
        assert isinstance(told, RunStatus)
        assert [row["name"] for row in told.set_aside] == ["one"]
        assert "scores 0 (no_answer) here" in told.set_aside[0]["reason"]
        assert told.rescored["differing"] == 1
        assert [row["id"] for row in told.workers] == ["two"]
        assert b'echo2_worker_set_aside{name="one"' in made.prometheus()

    async def main() -> None:
        await watching(await coordinator(scorer=ScoredAtOnce(TASKS), **ALL), story)

    run_virtual(main())


def test_a_set_aside_worker_stays_so_when_the_coordinator_starts_again_and_its_line_tells() -> None:
    store = MemoryStore(0.0)

    async def first(made: Coordinator) -> None:
        enrolled = await made.enrol(Enrol(token(made), "liar", PROTOCOL_VERSION, VERSION))
        worker = made.authenticate(enrolled.credential)
        epoch = await attach(made)
        await send(made, worker, await leased(made, worker), told=1.0)
        await asyncio.sleep(1.0)
        with pytest.raises(SetAside, match="no more work of worker liar"):
            made.authenticate(enrolled.credential)
        credentials.append(enrolled.credential)
        for _ in range(2):
            await send(made, TWO, await leased(made, TWO))
        await made.handle(LEARNER, RequestBatch(epoch, 0, 1.0))
        await made.handle(LEARNER, ReportStep(epoch, 0, 1.0, 0.0, {}))
        line = made.last_metrics
        assert line is not None
        assert (line.rescored_differing, line.workers_set_aside) == (1, 1)
        assert next(iter(line.set_aside.values())).startswith("liar: it sent the reward 1")
        assert line.generated == line.trained + line.expired + line.refused + line.buffered + line.failed

    credentials: list[str] = []

    def token(made: Coordinator) -> str:
        for operation in made.registry.issue_token("token", Role.WORKER, 9e18, 5):
            made.books.record(operation)
        return "token"

    async def main() -> None:
        await watching(await coordinator(store, scorer=ScoredAtOnce(TASKS), **ALL), first)
        again = await coordinator(store, scorer=ScoredAtOnce(TASKS), **ALL)
        with pytest.raises(SetAside, match="no more work of worker liar"):
            again.authenticate(credentials[0])
        assert [row["name"] for row in again.status().set_aside] == ["liar"]
        assert again.books.state.secret == "secret-1"
        assert counts_add_up(again)

    run_virtual(main())


def test_a_formed_batch_stays_as_it_is() -> None:
    """It may be trained already, and a crash must replay it unchanged."""

    async def main() -> None:
        made = await coordinator()
        epoch = await attach(made)
        for _ in range(2):
            await send(made, ONE, await leased(made, ONE), told=1.0)
        await made.handle(LEARNER, RequestBatch(epoch, 0, 1.0))
        digest = made.books.buffer.batches[0].digest
        await send(made, ONE, await leased(made, ONE), told=1.0)
        await made.hall.set_aside("one", "somebody found out")
        assert made.books.buffer.batches[0].digest == digest
        assert {row.state for row in made.books.buffer.batch_rows(made.books.buffer.batches[0])} == {RowState.BUFFERED}
        assert made.books.buffer.counts[RowState.REFUSED] == 2
        assert counts_add_up(made)
        await made.hall.set_aside("one", "twice")
        assert [outcast.reason for outcast in made.books.outcasts.all()] == ["somebody found out"]

    run_virtual(main())


def test_a_worker_that_waits_for_a_lease_is_told_at_once() -> None:
    async def main() -> None:
        made = await coordinator()
        waiting = asyncio.ensure_future(made.handle(ONE, RequestLease(V0, 30.0)))
        await asyncio.sleep(1.0)
        await made.hall.set_aside("one", "somebody found out")
        await asyncio.sleep(1.0)
        assert waiting.done(), "and its next question is refused"
        await attach(made)
        made.hall.pump()
        assert not made.books.fleet.leases

    run_virtual(main())


@pytest.mark.parametrize(
    ("scorer", "event", "failed"),
    [
        (Odd(NoScore("it took too long")), "rescoring_failed", 2),
        (Odd(NoScore("there is no tokenizer", for_good=True)), "rescoring_off", 0),
        (Odd(Score(0.5, "a"), Score(0.7, "b")), "score_not_repeatable", 0),
    ],
    ids=["no score", "no scorer", "chance"],
)
def test_what_cannot_be_scored_here_or_scores_by_chance_is_evidence_of_nothing(
    scorer: Odd, event: str, failed: int
) -> None:
    async def story(made: Coordinator) -> None:
        await attach(made)
        await send(made, ONE, await leased(made, ONE), told=1.0)
        await asyncio.sleep(1.0)
        assert len(kinds(made, event)) == (failed or 1)
        assert (made.books.state.rescoring_failed, made.books.state.rescored) == (failed, 0)
        assert len(made.books.outcasts) == len(made.books.docket) == 0

    async def main() -> None:
        await watching(await coordinator(scorer=scorer, **ALL), story)

    run_virtual(main())


def test_a_scorer_that_is_slow_holds_up_neither_leases_nor_batches() -> None:
    class Slow:
        async def score(self, prompt: Prompt, reply: bytes) -> Score:
            await asyncio.sleep(1000.0)
            raise NoScore("too late")

    async def story(made: Coordinator) -> None:
        epoch = await attach(made)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(2):
            await send(made, ONE, await leased(made, ONE))
        await made.handle(LEARNER, RequestBatch(epoch, 0, 1.0))
        assert loop.time() - began_s < 1.0

    async def main() -> None:
        await watching(await coordinator(scorer=Slow(), **ALL), story)

    run_virtual(main())


def test_what_a_liar_said_of_held_out_prompts_is_scored_by_others() -> None:
    async def story(made: Coordinator) -> None:
        epoch = await attach(made)
        for _ in range(2):
            await send(made, TWO, await leased(made, TWO))
        await made.handle(LEARNER, RequestBatch(epoch, 0, 1.0))
        await made.handle(LEARNER, ReportStep(epoch, 0, 1.0, 0.0, {}))
        evaluation = made.books.evaluation
        assert evaluation is not None
        evaluation.policy = V0
        for worker, told in ((TWO, None), (ONE, 1.0)):
            grant = await leased(made, worker)
            assert grant.purpose == "eval"
            assert set(await send(made, worker, grant, told)) == {Verdict.ACCEPTED}
        await asyncio.sleep(1.0)
        assert "one" in made.books.outcasts
        for _ in range(2):
            grant = await leased(made, TWO)
            assert grant.purpose == "eval"
            await send(made, TWO, grant)
        (line,) = kinds(made, "evaluated")
        assert (line["reward"], line["prompts"]) == (0.5, 3)

    async def main() -> None:
        sections = {**ALL, "eval": {"every_steps": 1, "prompts": 3, "samples": 2}}
        await watching(await coordinator(scorer=ScoredAtOnce(TASKS), **sections), story)

    run_virtual(main())


def test_without_a_scorer_nothing_is_kept_to_be_scored() -> None:
    async def main() -> None:
        made = await coordinator(**ALL)
        await attach(made)
        publish(made, V0)
        await send(made, ONE, await leased(made, ONE), told=1.0)
        assert len(made.books.docket) == 0

    run_virtual(main())
