"""Joining a run whose coordinator may not be there yet.

Invariant: only silence is retried; a wrong token or another run's authority is told at once.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Protocol

from echo2.errors import Starved, TransportError
from echo2.ports import Clock, EventLog
from echo2.transport.messages import Enrolled
from echo2.transport.patience import Backoff

JOIN_PATIENCE_S = 1800.0
"""How long a program that never reached its coordinator keeps trying; the run's own limits are unknown to it yet."""


class Enrolling(Protocol):
    async def enrol(self, name: str) -> Enrolled: ...


async def enrol_patiently(transport: Enrolling, name: str, clock: Clock, events: EventLog, jitter: Random) -> Enrolled:
    """Raises Starved after ``JOIN_PATIENCE_S``, Unauthorised, Refused, UserError."""
    backoff = Backoff(jitter)
    started_s = clock.monotonic()
    while True:
        try:
            return await transport.enrol(name)
        except TransportError as error:
            if clock.monotonic() - started_s > JOIN_PATIENCE_S:
                silent = f"the coordinator could not be reached for {JOIN_PATIENCE_S:.0f} s: {error}"
                raise Starved(f"{silent}; check the join string's address and that the run still goes on") from error
            pause_s = backoff.next_s()
            events.emit("coordinator_unreachable", request="Enrol", error=str(error), retry_in_s=round(pause_s, 3))
            await asyncio.sleep(pause_s)
