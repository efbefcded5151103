"""The event log of a simulated run.

Invariant (I10): an entry holds virtual time, who, what and plain values; two runs are the same when their logs are.
"""

from __future__ import annotations

import asyncio
from typing import Any


class RecordedEvents:
    """An ``EventLog`` that keeps everything; ``of`` gives one program's voice in the same log."""

    def __init__(self, who: str = "", events: list[dict[str, Any]] | None = None) -> None:
        self.who = who
        self.events: list[dict[str, Any]] = [] if events is None else events

    def of(self, who: str) -> RecordedEvents:
        return RecordedEvents(who, self.events)

    def emit(self, kind: str, **fields: Any) -> None:
        now_s = round(asyncio.get_running_loop().time(), 6)
        self.events.append({"at_s": now_s, "who": self.who, "kind": kind, **fields})

    def kinds(self, kind: str, who: str = "") -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind and who in ("", event["who"])]
