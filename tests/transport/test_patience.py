from __future__ import annotations

import asyncio
from random import Random

import pytest

from echo2.errors import Refused, Starved, TransportError, first_cause
from echo2.simulation.clock import VirtualClock
from echo2.simulation.loop import run_virtual
from echo2.simulation.record import RecordedEvents
from echo2.transport.messages import Done, GetStatus, Leave, Reply, Request, RequestLease, RunStatus
from echo2.transport.patience import Backoff, Line, Recall
from echo2.types import Policy


class Scripted:
    """Answers from a list; an exception in it is raised, None never answers."""

    def __init__(self, *answers: Reply | Exception | None) -> None:
        self.answers = list(answers)
        self.asked: list[Request] = []

    async def call(self, request: Request) -> Reply:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


def line(transport: Scripted, events: RecordedEvents, give_up_after_s: float = 100.0) -> Line:
    return Line(transport, VirtualClock(), events, Random(1), give_up_after_s)


def test_pauses_grow_are_capped_and_differ_between_workers() -> None:
    backoff, other = Backoff(Random(1), 0.5, 30.0), Backoff(Random(2), 0.5, 30.0)
    pauses = [backoff.next_s() for _ in range(12)]
    assert all(0.25 <= pause <= 30 for pause in pauses)
    assert pauses[:4] == sorted(pauses[:4])
    assert all(15 <= pause <= 30 for pause in pauses[-3:])
    assert [other.next_s() for _ in range(12)] != pauses
    backoff.reset()
    assert backoff.next_s() <= 0.5


def test_a_lost_answer_is_asked_for_again_and_said() -> None:
    async def main() -> None:
        events = RecordedEvents()
        transport = Scripted(TransportError("no route"), TransportError("no route"), Done())
        assert await line(transport, events).call(Leave(), Done) == Done()
        assert len(transport.asked) == 3
        told = [event for event in events.events if event["kind"] == "coordinator_unreachable"]
        assert [event["error"] for event in told] == ["no route", "no route"]
        assert all(event["retry_in_s"] > 0 for event in told)

    run_virtual(main())


def test_silence_beyond_patience_ends_with_a_sentence() -> None:
    async def main() -> None:
        with pytest.raises(Starved, match=r"must answer within 100 s and was silent for 1\d\d s \(no route\)"):
            await line(Scripted(TransportError("no route")), RecordedEvents()).call(Leave(), Done)

    run_virtual(main())


def test_an_answer_that_never_comes_is_a_transport_error_after_its_deadline() -> None:
    async def main() -> float:
        request = RequestLease(Policy(0, 0), 20.0)
        with pytest.raises(TransportError, match="no answer to RequestLease within 50 s"):
            await line(Scripted(None), RecordedEvents()).once(request, Done)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 50.0


def test_a_refusal_is_not_retried() -> None:
    async def main() -> int:
        transport = Scripted(Refused("no"))
        with pytest.raises(Refused, match="no"):
            await line(transport, RecordedEvents()).call(Leave(), Done)
        return len(transport.asked)

    assert run_virtual(main()) == 1


def test_an_answer_of_another_kind_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(Refused, match="GetStatus was answered with Done"):
            await line(Scripted(Done()), RecordedEvents()).once(GetStatus(), RunStatus)

    run_virtual(main())


def test_a_recall_ends_waits_now_and_later_ones_at_once() -> None:
    async def main() -> None:
        recall = Recall()
        loop = asyncio.get_running_loop()
        loop.call_later(7, recall.call)
        assert await recall.within(None, "nothing", asyncio.Event().wait()) is None
        assert loop.time() == 7
        assert await recall.within(5, "nothing", asyncio.sleep(100, "late")) is None
        await recall.pause(100)
        assert loop.time() == 7

    run_virtual(main())


def test_work_that_ends_in_time_gives_its_result_and_work_that_does_not_is_named() -> None:
    async def main() -> None:
        recall = Recall()
        assert await recall.within(5, "a nap", asyncio.sleep(3, "rested")) == "rested"
        with pytest.raises(Starved, match="a nap did not end within 5 s"):
            await recall.within(5, "a nap", asyncio.sleep(30))

    run_virtual(main())


def test_a_time_out_inside_the_work_is_not_taken_for_a_recall() -> None:
    async def work() -> None:
        raise TimeoutError("inner")

    async def main() -> None:
        with pytest.raises(TimeoutError, match="inner"):
            await Recall().within(5, "work", work())

    run_virtual(main())


def test_the_first_cause_is_ours_before_anything_else() -> None:
    ours = Refused("ours")
    group = BaseExceptionGroup("all", [ValueError("other"), BaseExceptionGroup("inner", [ours])])
    assert first_cause(group) is ours
    assert str(first_cause(BaseExceptionGroup("all", [ValueError("only")]))) == "only"
