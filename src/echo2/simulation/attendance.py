"""Heartbeats that would change nothing, kept back (PROTOCOL §7).

Invariant: the coordinator's books are what they would be if every beat had arrived: whose beats are kept back counts
as heard when its last one would have been, and beats for real as soon as the answer, or the missing of one, would tell
anybody anything: the line or the coordinator went down, a lease was taken back, the run or the worker is to end, a
message was lost lately, something was installed. Beats are kept back at their mean distance, so what they would have
shown is shown within one heartbeat of when it would have been.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from echo2.coordinator.fleet import WorkerRecord
from echo2.coordinator.worker_desk import LEASE_REPLY_GRACE_S
from echo2.simulation.links import Desk, VirtualLine
from echo2.simulation.record import RecordedEvents
from echo2.worker.pulse import spread

Workers = Callable[[], Mapping[str, WorkerRecord]]
"""The coordinator's, as they are now."""


class Attendance:
    """Of all workers of a world."""

    def __init__(self, desk: Desk, events: RecordedEvents, workers: Workers, heartbeat_s: float, look_s: float) -> None:
        """look_s: between two looks at the books; well below the silence that counts as death."""
        self.heartbeat_s = heartbeat_s
        self._look_s = look_s
        self._workers = workers
        self._resting: dict[str, QuietPulse] = {}
        """By worker's id: those whose beats are kept back."""
        desk.watchers.append(self.wake_all)
        events.listen("lease_lost", self._told)
        events.listen("lease_ended", self._told)
        events.listen("draining", lambda event: self.wake_all())

    @property
    def doubt_s(self) -> float:
        """Time after a lost message in which beats may show what was lost."""
        return max(LEASE_REPLY_GRACE_S, 5 * self.heartbeat_s) + 3 * self.heartbeat_s

    def _told(self, event: Mapping[str, Any]) -> None:
        if (pulse := self._resting.get(event["worker"])) is not None:
            pulse.wake()

    def wake_all(self) -> None:
        for pulse in list(self._resting.values()):
            pulse.wake()

    def rest(self, worker_id: str, pulse: QuietPulse) -> None:
        self._resting[worker_id] = pulse

    def rise(self, worker_id: str, heard_s: float) -> None:
        """Its beats are real from now on; the last one that was kept back would have been heard then."""
        del self._resting[worker_id]
        worker = self._workers().get(worker_id)
        if worker is not None and worker.active and heard_s > 0:
            worker.last_seen_s = heard_s

    async def run(self) -> None:
        """Consumes time, for as long as a coordinator lives; produces what heartbeats would have written down."""
        while True:
            await asyncio.sleep(self._look_s)
            workers, now_s = self._workers(), asyncio.get_running_loop().time()
            for worker_id, pulse in self._resting.items():
                worker = workers.get(worker_id)
                if worker is None or not worker.active or worker.draining:
                    pulse.wake()
                else:
                    worker.last_seen_s = now_s  # to be set right when its beats are missed


class QuietPulse:
    """``Pulse`` of a worker in a world that keeps beats back."""

    def __init__(self, attendance: Attendance, line: VirtualLine, jitter: Random) -> None:
        self._attendance = attendance
        self._line = line
        self._jitter = jitter
        self._woken = asyncio.Event()
        self._hurried = asyncio.Event()
        self._rested_s = 0.0
        """When the answer to the last real beat had come."""
        line.watchers.append(self.wake)

    def hurry(self) -> None:
        self._hurried.set()
        self._woken.set()

    def wake(self) -> None:
        """A beat would tell something: the next one is real."""
        self._woken.set()

    async def wait(self) -> float:
        """When the coordinator was heard meanwhile."""
        self._rested_s = asyncio.get_running_loop().time()
        if self._may_rest():
            heard_s = await self._rest()
            await _until(self._hurried, self._next_beat_s())
        else:
            heard_s = float("-inf")
            await _until(self._hurried, self._rested_s + self._attendance.heartbeat_s * spread(self._jitter))
        self._hurried.clear()
        return heard_s

    def heard_s(self, now_s: float) -> float:
        """When the last beat before that would have arrived."""
        arrived = math.floor((now_s - self._rested_s - self._one_way_s) / self._period_s)
        return self._rested_s + arrived * self._period_s + self._one_way_s if arrived > 0 else float("-inf")

    @property
    def _one_way_s(self) -> float:
        return self._line.link.latency_s * (1 + self._line.link.jitter / 2)

    @property
    def _period_s(self) -> float:
        return self._attendance.heartbeat_s + 2 * self._one_way_s

    def _next_beat_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        return self._rested_s + self._period_s * (math.floor((now_s - self._rested_s) / self._period_s) + 1)

    def _may_rest(self) -> bool:
        is_sure = self._rested_s - self._line.lost_at_s > self._attendance.doubt_s
        return self._line.is_up and self._line.beat_was_answered and is_sure and not self._hurried.is_set()

    async def _rest(self) -> float:
        self._woken.clear()
        worker_id = self._line.principal.peer_id
        self._attendance.rest(worker_id, self)
        heard_s = float("-inf")
        try:
            self._line.loses_beat = not await _until(self._woken, self._first_loss_s())
        finally:
            heard_s = self.heard_s(asyncio.get_running_loop().time())
            self._attendance.rise(worker_id, heard_s)
        return heard_s

    def _first_loss_s(self) -> float | None:
        """When a beat will be lost on the way; None for never."""
        loss = 1 - (1 - self._line.link.loss) ** 2
        if loss <= 0:
            return None
        beats = 1 + math.floor(math.log(1 - self._jitter.random()) / math.log1p(-loss))
        return self._rested_s + (beats - 0.5) * self._period_s


async def _until(event: asyncio.Event, deadline_s: float | None) -> bool:
    """Whether the event came by then."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline_s):
            await event.wait()
    return event.is_set()
