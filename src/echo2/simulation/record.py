"""The event log of a simulated run.

Invariant (I10): an entry holds virtual time, who, what and plain values; two runs are the same when their logs are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

Listener = Callable[[dict[str, Any]], None]


class RecordedEvents:
    """An ``EventLog`` that keeps everything; ``of`` gives one program's voice in the same log."""

    def __init__(
        self,
        who: str = "",
        events: list[dict[str, Any]] | None = None,
        listeners: dict[tuple[str, str], Listener] | None = None,
    ) -> None:
        self.who = who
        self.events: list[dict[str, Any]] = [] if events is None else events
        self._listeners: dict[tuple[str, str], Listener] = {} if listeners is None else listeners

    def of(self, who: str) -> RecordedEvents:
        return RecordedEvents(who, self.events, self._listeners)

    def listen(self, kind: str, listener: Listener) -> None:
        """Call ``listener`` for every event of the kind that this voice tells, in whichever life. One per kind."""
        self._listeners[self.who, kind] = listener

    def emit(self, kind: str, **fields: Any) -> None:
        now_s = round(asyncio.get_running_loop().time(), 6)
        event = {"at_s": now_s, "who": self.who, "kind": kind, **fields}
        self.events.append(event)
        if (listener := self._listeners.get((self.who, kind))) is not None:
            listener(event)

    def kinds(self, kind: str, who: str = "") -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind and who in ("", event["who"])]
