"""When a worker's heartbeats are due.

Invariant (I7): between two beats lies a heartbeat's time, give or take a tenth, so that many workers do not beat in
step; news that the coordinator should hear goes out at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Protocol

SPREAD = 0.1
"""Share of the time between two beats by which it varies."""


class Pulse(Protocol):
    def hurry(self) -> None:
        """Something happened that the coordinator should hear now."""
        ...

    async def wait(self) -> float:
        """Until the next beat is due; at once when ``hurry`` was called since the last wait ended.

        When the coordinator was heard meanwhile by other means than messages, on the worker's clock; -inf for never.
        """
        ...


class SteadyPulse:
    def __init__(self, heartbeat_s: float, jitter: Random) -> None:
        self._heartbeat_s = heartbeat_s
        self._jitter = jitter
        self._hurried = asyncio.Event()

    def hurry(self) -> None:
        self._hurried.set()

    async def wait(self) -> float:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_s * spread(self._jitter)):
                await self._hurried.wait()
        self._hurried.clear()
        return float("-inf")


def spread(jitter: Random) -> float:
    """Factor on the time between two beats."""
    return 1 - SPREAD + 2 * SPREAD * jitter.random()
