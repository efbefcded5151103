"""The coordinator's program on a store in memory, asked directly and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import desks
import msgspec
from building import row, trajectory
from loopback import serving

from echo2.coordinator.http import build_app
from echo2.coordinator.program import Coordinator
from echo2.simulation.clock import VirtualClock
from echo2.simulation.loop import run_virtual
from echo2.simulation.record import RecordedEvents
from echo2.transport.codec import encode
from echo2.transport.messages import (
    PROTOCOL_VERSION,
    Enrol,
    Heartbeat,
    Hello,
    LeaseGrant,
    RequestLease,
    Role,
    RowSubmission,
    SubmitGroup,
    SubmitVerdicts,
)
from echo2.types import Policy, RowState, RowStatus, Verdict
from echo2.version import VERSION

KEY = bytes(range(32))
V0 = Policy(0, 0)
DEAD_AFTER_S = 30.0


class ShiftedClock(VirtualClock):
    """The loop's time and whatever passed unseen, as for a process that was stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.unseen_s


async def coordinator(clock: ShiftedClock) -> Coordinator:
    """One whose version 0 is published and whose worker tokens are good for 10 enrolments."""
    rollout = {"engine": "scripted", "rollouts_per_step": 8, "group_size": 4}
    made = await desks.coordinator(clock=clock, rollout=rollout, coordinator={"dead_after_s": DEAD_AFTER_S})
    made.registry.issue_token("token-worker", Role.WORKER, clock.wall() + 1e6, 10)
    desks.publish(made, V0)
    return made


async def enrolled(made: Coordinator, name: str) -> str:
    """Credential of a new worker that has said hello and can be leased to."""
    credential = (await made.enrol(Enrol("token-worker", name, PROTOCOL_VERSION, VERSION))).credential
    await made.handle(made.authenticate(credential), Hello((), {}))
    await made.handle(made.authenticate(credential), Heartbeat(V0, ()))
    return credential


async def leased(made: Coordinator, credential: str) -> LeaseGrant:
    grant = await made.handle(made.authenticate(credential), RequestLease(V0, 1.0))
    assert isinstance(grant, LeaseGrant)
    return grant


def finished(grant: LeaseGrant) -> SubmitGroup:
    rows = tuple(row(index, trajectory(grant.prompt, grant.policy)) for index in grant.indices)
    return SubmitGroup(grant.lease_id, grant.group_id, grant.attempt, rows)


Post = Callable[[str, bytes], Awaitable[tuple[int, list[Verdict]]]]


def posting(session: aiohttp.ClientSession) -> Post:
    async def post(credential: str, body: bytes) -> tuple[int, list[Verdict]]:
        headers = {"Authorization": f"Bearer {credential}"} if credential else {}
        async with session.post("/v1/SubmitGroup", data=body, headers=headers) as response:
            data = await response.read()
            if response.status != 200:
                return response.status, []
            return 200, list(msgspec.msgpack.decode(data, type=SubmitVerdicts).verdicts)

    return post


async def test_a_captured_submission_counts_once_whoever_sends_it_again_and_whenever() -> None:
    """Field report H03. There is no timestamp or signature to leave out: a row counts once under the lease of the
    worker whose credential sends it."""
    clock = ShiftedClock()
    made = await coordinator(clock)
    one, two = await enrolled(made, "one"), await enrolled(made, "two")
    of_one, of_two = finished(await leased(made, one)), finished(await leased(made, two))
    captured = encode(of_one)
    async with serving(build_app(made, clock)) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        post = posting(session)

        assert await post(one, captured) == (200, [Verdict.ACCEPTED] * 4)
        once = dict(made.books.buffer.counts)
        assert once[RowState.BUFFERED] == 4

        for later_s in (0.0, 600.0):  # at once, as after a lost answer; and ten minutes later
            clock.unseen_s += later_s
            assert await post(one, captured) == (200, [Verdict.ACCEPTED] * 4), "the old verdict, and nothing new"
        assert await post(two, captured) == (200, [Verdict.UNATTRIBUTED] * 4)
        forged = msgspec.structs.replace(of_two, lease_id=of_one.lease_id)
        assert await post(two, encode(forged)) == (200, [Verdict.UNATTRIBUTED] * 4)
        assert await post(one, encode(of_two)) == (200, [Verdict.UNATTRIBUTED] * 4)
        for stranger in ("", "nonsense", "token-worker"):
            assert await post(stranger, captured) == (401, [])
        assert dict(made.books.buffer.counts) == once

        assert await post(two, encode(of_two)) == (200, [Verdict.ACCEPTED] * 4), "nobody used up what was another's"
    assert made.books.buffer.generated == 8
    assert made.books.state.unattributed == 12


def test_a_coordinator_that_stood_still_takes_nobody_for_dead() -> None:
    """Field report H05: five minutes of SIGSTOP are its own silence; a worker's are counted from then on."""

    async def main() -> tuple[Coordinator, list[bool]]:
        clock = ShiftedClock()
        made = await coordinator(clock)
        credential = await enrolled(made, "one")
        await leased(made, credential)
        seen = []
        watching = asyncio.create_task(made.run())
        await asyncio.sleep(5)
        clock.unseen_s += 300.0
        for wait_s in (20.0, DEAD_AFTER_S):
            await asyncio.sleep(wait_s)
            seen.append(bool(made.books.fleet.active()))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return made, seen

    made, seen = run_virtual(main())
    assert seen == [True, False]
    events = made.events
    assert isinstance(events, RecordedEvents)
    assert [event["kind"] for event in events.events if event["kind"] in ("stood_still", "lease_lost")] == [
        "stood_still",
        "lease_lost",
    ]


def test_a_lost_lease_is_drawn_again_as_it_was_and_a_failed_one_anew() -> None:
    """So that a crash at the wrong moment does not change what a resumed run is trained on."""

    async def main() -> list[LeaseGrant]:
        made = await coordinator(ShiftedClock())
        credential = await enrolled(made, "one")
        grants = [await leased(made, credential)]
        await made.handle(made.authenticate(credential), Hello((), {}))  # restarted: it does not know the lease
        grants.append(await leased(made, credential))
        last = grants[-1]
        failed = tuple(RowSubmission(i, RowStatus.ERROR, error="engine fell over") for i in last.indices)
        await made.handle(
            made.authenticate(credential), SubmitGroup(last.lease_id, last.group_id, last.attempt, failed)
        )
        return [*grants, await leased(made, credential)]

    first, again, anew = run_virtual(main())
    assert [(grant.group_id, grant.attempt) for grant in (first, again, anew)] == [(0, 1), (0, 2), (0, 3)]
    assert again.sampling == first.sampling
    assert anew.sampling.seed != first.sampling.seed


def test_a_snapshot_of_another_size_than_the_one_before_is_remarked_on() -> None:
    """Field report E12: twice the bytes is a change of element type that nobody asked for."""

    async def main() -> list[dict[str, object]]:
        made = await coordinator(ShiftedClock())
        for version, size in ((2, 100), (4, 200), (6, 200)):
            desks.publish(made, Policy(0, version), size)
        events = made.events
        assert isinstance(events, RecordedEvents)
        return events.kinds("snapshot_size_changed")

    (told,) = run_virtual(main())
    assert (told["policy"], told["bytes"], told["bytes_before"]) == ("0.4", 200, 100)
