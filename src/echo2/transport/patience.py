"""Waiting well: bounded, interruptible, and never in step with others.

Invariant (I7): every wait here has a deadline, ends early when it is recalled, and its error says what it waited for.
Retries are jittered, so that a crowd of workers does not come back in waves (field report H09).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from echo2.errors import Refused, Starved, TransportError
from echo2.ports import Clock, EventLog, Transport
from echo2.transport.messages import Reply, Request

T = TypeVar("T")
R = TypeVar("R", bound=Reply)

ANSWER_GRACE_S = 30.0
"""A reply may take so long beyond the wait that its request asked for."""
SHORTEST_POLL_S = 0.25
"""Polls that are answered sooner are spaced out, so an eager coordinator cannot make its clients spin."""


class Backoff:
    """Exponential pauses, each drawn from the upper half of its range."""

    def __init__(self, jitter: Random, first_s: float = 0.5, most_s: float = 30.0) -> None:
        self._jitter = jitter
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def next_s(self) -> float:
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return longest_s * (0.5 + 0.5 * self._jitter.random())

    def reset(self) -> None:
        self._failures = 0


class Recall:
    """A reason to stop waiting. ``call`` brings the deadline of every wait under it forward to now."""

    def __init__(self) -> None:
        self.called = False
        self._open: list[asyncio.Timeout] = []

    def call(self) -> None:
        self.called = True
        for scope in self._open:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    async def within(self, limit_s: float | None, what: str, work: Coroutine[Any, Any, T]) -> T | None:
        """Result of ``work``; None when recalled first. Raises Starved naming ``what`` when ``limit_s`` passed.

        ``limit_s`` None is for work whose own parts are bounded.
        """
        if self.called:
            work.close()
            return None
        try:
            async with asyncio.timeout(limit_s) as scope:
                self._open.append(scope)
                try:
                    return await work
                finally:
                    self._open.remove(scope)
        except TimeoutError as error:
            if not scope.expired():
                raise
            if self._was_called():
                return None
            raise Starved(f"{what} did not end within {limit_s:g} s") from error

    def _was_called(self) -> bool:
        """``called`` may have changed while something was awaited."""
        return self.called

    async def pause(self, pause_s: float) -> None:
        """Sleep, unless recalled."""
        await self.within(None, "a pause", asyncio.sleep(pause_s))


class Line:
    """A transport that keeps trying for as long as its owner has patience, and says so."""

    def __init__(
        self, transport: Transport, clock: Clock, events: EventLog, jitter: Random, give_up_after_s: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._events = events
        self._jitter = jitter
        self._give_up_after_s = give_up_after_s
        self._heard_at_s = float("-inf")

    def heard(self, at_s: float) -> None:
        """The other side was there at that time, on our clock."""
        self._heard_at_s = max(self._heard_at_s, at_s)

    async def once(self, request: Request, *expected: type[R]) -> R:
        """One try. Raises TransportError (no answer in time), Refused (the answer was no)."""
        name = type(request).__name__
        limit_s = float(getattr(request, "wait_s", 0.0)) + ANSWER_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._transport.call(request)
        except TimeoutError as error:
            raise TransportError(f"no answer to {name} within {limit_s:g} s") from error
        self.heard(self._clock.monotonic())
        if not isinstance(reply, expected):
            raise Refused(f"{name} was answered with {type(reply).__name__}; update the older of the two programs")
        return reply

    async def call(self, request: Request, *expected: type[R], patience: Callable[[], float] | None = None) -> R:
        """Try until there is an answer. Raises Starved when the silence outlasts ``patience``; Refused."""
        backoff = Backoff(self._jitter)
        started_s = self._clock.monotonic()
        while True:
            try:
                return await self.once(request, *expected)
            except TransportError as error:
                self.lose_patience(error, started_s, patience)
                pause_s = backoff.next_s()
                self._events.emit(
                    "coordinator_unreachable",
                    request=type(request).__name__,
                    error=str(error),
                    retry_in_s=round(pause_s, 3),
                )
                await asyncio.sleep(pause_s)

    def lose_patience(self, error: TransportError, since_s: float, patience: Callable[[], float] | None = None) -> None:
        """Raises Starved when nothing was heard for too long, counted from ``since_s`` at the earliest."""
        limit_s = self._give_up_after_s if patience is None else patience()
        silence_s = self._clock.monotonic() - max(since_s, self._heard_at_s)
        if silence_s > limit_s:
            raise Starved(
                f"the coordinator must answer within {limit_s:g} s and was silent for {silence_s:.0f} s ({error}); "
                "check that it runs and can be reached, then start again"
            ) from error


async def space_out(asked_s: float, clock: Clock, recall: Recall) -> None:
    """Wait until the shortest time between two polls has passed."""
    early_s = asked_s + SHORTEST_POLL_S - clock.monotonic()
    if early_s > 0:
        await recall.pause(early_s)
