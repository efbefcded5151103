"""Waiting for a change of state, without polling.

Invariant: a wake-up cannot be lost. A waiter registers before it gives control back, and ``notify`` wakes everyone
registered at that moment; whoever wakes looks at the state again.
"""

from __future__ import annotations

import asyncio
from collections import deque

from echo2.transport.messages import LeaseGrant, LeaseWait
from echo2.types import Policy


class Wakeup:
    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Whether a notification came within the time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(waiter, None)
        return True


class LeaseQueue:
    """Workers that wait for a lease, first come first served among those with the same installed version.

    The gate answers the same for the same version, so one refusal settles all waiters behind the first.
    """

    def __init__(self) -> None:
        self._waiting: dict[Policy, deque[tuple[str, asyncio.Future[LeaseGrant | LeaseWait]]]] = {}
        self._asked: dict[str, list[tuple[Policy, asyncio.Future[LeaseGrant | LeaseWait]]]] = {}
        """By worker; ended ones linger until it asks again."""

    def put(self, worker_id: str, installed: Policy) -> asyncio.Future[LeaseGrant | LeaseWait]:
        waiter: asyncio.Future[LeaseGrant | LeaseWait] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(installed, deque()).append((worker_id, waiter))
        asked = [(version, other) for version, other in self._asked.get(worker_id, ()) if not other.done()]
        self._asked[worker_id] = [*asked, (installed, waiter)]
        return waiter

    def versions(self) -> list[Policy]:
        """Versions somebody waits with, newest first."""
        return sorted((version for version, queue in self._waiting.items() if queue), reverse=True)

    def first(self, installed: Policy) -> tuple[str, asyncio.Future[LeaseGrant | LeaseWait]] | None:
        """The first live waiter with this version; it stays queued."""
        queue = self._waiting.get(installed, deque())
        while queue and queue[0][1].done():
            queue.popleft()
        if not queue:
            self._waiting.pop(installed, None)
            return None
        return queue[0]

    def send_back(self, worker_id: str, installed: Policy) -> None:
        """The worker has installed something else meanwhile: it asks again under that."""
        for version, waiter in self._asked.get(worker_id, ()):
            if version != installed and not waiter.done():
                waiter.set_result(LeaseWait(f"{installed} was installed meanwhile"))

    def turn_away(self, worker_id: str, reason: str) -> None:
        """The worker gets no lease now, whatever the gate says: those behind it shall not wait for it."""
        for _, waiter in self._asked.get(worker_id, ()):
            if not waiter.done():
                waiter.set_result(LeaseWait(reason))

    @staticmethod
    def forget(waiter: asyncio.Future[LeaseGrant | LeaseWait]) -> None:
        """Its request ended; ``first`` passes over it."""
        waiter.cancel()
