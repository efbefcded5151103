"""Leases: who gets them, when they end, and what workers cannot make the coordinator believe."""

from __future__ import annotations

import asyncio

import pytest
from desks import LEARNER, ONE, TWO, V0, attach, coordinator, generate, leased, publish, submitted

from echo2.coordinator.worker_desk import MAX_STATE_CHARACTERS
from echo2.data.task import Split
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.errors import Starved, TaskFault
from echo2.simulation.loop import run_virtual
from echo2.simulation.record import RecordedEvents
from echo2.transport.messages import Heartbeat, HeartbeatReply, LeaseGrant, ReportStep, RequestBatch, RequestLease
from echo2.types import Policy, Prompt, Verdict


def test_an_install_that_nobody_published_is_not_believed() -> None:
    """It would complete a publish (T_bcast) and end an evaluation that nobody has seen."""

    async def main() -> None:
        made = await coordinator()
        await attach(made)
        await made.handle(TWO, Heartbeat(None, ()))
        await made.handle(ONE, Heartbeat(Policy(0, 8), ()))
        assert made.books.fleet.workers["one"].installed is None
        assert made.books.scoreboard.t_bcast_s is None
        await made.handle(ONE, Heartbeat(V0, ()))
        assert made.books.fleet.workers["one"].installed == V0

    run_virtual(main())


def test_what_a_worker_says_of_itself_is_cut_to_what_people_can_read() -> None:
    async def main() -> None:
        made = await coordinator()
        await made.handle(ONE, Heartbeat(None, (), state="x" * 100_000))
        assert len(made.books.fleet.workers["one"].state) == MAX_STATE_CHARACTERS

    run_virtual(main())


def test_a_lease_granted_in_the_moment_its_wait_ends_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be lost until its worker's silence about it is noticed."""
    shut = ["the gate is shut"]
    monkeypatch.setattr("echo2.coordinator.worker_desk.closed_because", lambda *_: shut[0] if shut else None)

    async def main() -> None:
        made = await coordinator()
        await attach(made)
        await made.handle(ONE, Heartbeat(V0, ()))
        loop = asyncio.get_running_loop()

        def open_gate() -> None:
            shut.clear()
            made.hall.pump()

        loop.call_at(loop.time() + 5.0, open_gate)
        reply = await made.handle(ONE, RequestLease(V0, 5.0))
        assert isinstance(reply, LeaseGrant)
        assert list(made.books.fleet.leases) == [reply.lease_id]

    run_virtual(main())


def test_a_lease_whose_group_aged_out_ends_and_its_worker_is_told() -> None:
    """A second attempt hangs while the run goes on: the group's accepted row expires, then the group is forgotten."""

    async def main() -> None:
        made = await coordinator(staleness={"budget": 3, "publish_period": 2}, run={"steps": 300})
        epoch = await attach(made)
        await submitted(made, ONE, await leased(made, ONE), failed=1)
        hung = await leased(made, ONE)
        assert (hung.group_id, hung.attempt) == (0, 2)
        for step in range(5):
            newest = made.books.state.current
            assert newest is not None
            await generate(made, 2, TWO, newest)
            await made.handle(LEARNER, RequestBatch(epoch, step, 1.0))
            await made.handle(LEARNER, ReportStep(epoch, step, 1.0, 0.0, {}))
            if (step + 1) % 2 == 0:
                made.hall.learner.ack_checkpoint(epoch, step + 1)
                publish(made, Policy(0, step + 1))
        made.books.buffer._forget(made.books.buffer.next_batch + 1)  # as after 50 more steps
        assert made.books.kept_policies() >= {made.books.state.current}
        made.hall.workers.tick(made.clock.monotonic())
        assert hung.lease_id not in made.books.fleet.leases
        reply = await made.handle(ONE, Heartbeat(V0, (hung.lease_id,)))
        assert isinstance(reply, HeartbeatReply)
        assert reply.revoked_leases == (hung.lease_id,)

    run_virtual(main())


def test_a_pool_whose_every_group_fails_ends_the_run_however_busy_it_is() -> None:
    """Granting a lease is progress only while leases bear fruit: else a broken engine would be paid for ever (I7)."""

    async def main() -> None:
        made = await coordinator(coordinator={"stall_s": 100.0, "dead_after_s": 1e6, "max_attempts": 1})
        epoch = await attach(made)

        async def learner() -> None:
            while True:
                await made.handle(LEARNER, RequestBatch(epoch, 0, 30.0))

        async def broken_worker() -> None:
            while True:
                grant = await leased(made, ONE)
                await asyncio.sleep(5.0)
                assert set(await submitted(made, ONE, grant, failed=2)) == {Verdict.FAILED}

        tasks = [asyncio.ensure_future(learner()), asyncio.ensure_future(broken_worker())]
        try:
            with pytest.raises(Starved, match=r"no trajectory was accepted for 1\d\d s .* the last leases ended"):
                await made.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(made.events, RecordedEvents)
        assert len(made.events.kinds("lease")) > 10

    run_virtual(main(), until_s=1000.0)


def test_a_prompt_that_its_task_cannot_give_is_passed_over_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad row costs its group; where every row is bad, whoever asks is told why."""
    hopeless = []

    def prompt(self: Arithmetic, split: Split, index: int) -> Prompt:
        if hopeless or index == 0:
            raise KeyError("question")
        return given(self, split, index)

    given = Arithmetic.prompt
    monkeypatch.setattr(Arithmetic, "prompt", prompt)

    async def main() -> None:
        made = await coordinator()
        await attach(made)
        await made.handle(ONE, Heartbeat(V0, ()))
        first = await leased(made, ONE)
        assert first.prompt.prompt_id == "arithmetic/train/1"
        assert made.books.state.cursor == 2
        assert (await leased(made, ONE)).prompt.prompt_id == "arithmetic/train/2"
        hopeless.append(True)
        with pytest.raises(TaskFault, match="must give prompt train/102, it raised KeyError: 'question'"):
            await leased(made, ONE)

    run_virtual(main())
