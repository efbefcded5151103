"""When the congestion control of a held connection begins anew.

Invariant: only a connection that is held, sends and finds its line empty is renewed, as soon as it flows and then every
``RENEW_S``. Pure.

Unless told otherwise BBR sends next to nothing for a fifth of a second every ten seconds, to see how long packets take
through an empty line. In a chain those gaps add up, hop by hop: all lines are equally fast, so nobody catches up; and
an object that takes a second is late by a fifth wherever one falls into it. A connection that is held below its line's
rate finds the line empty anyway. In full flow it can begin anew without a pause: it knows its rate again after a round
trip, and the next gap is ten seconds away. From rest it would have to find its rate, so there it keeps what it knows.

Where packets or acknowledgements wait all the same (a full uplink beside a fast download), BBR must learn that its
round trip has become longer, or it sends too little: such a connection is left alone.
"""

from __future__ import annotations

FLOWS_S = 0.1
"""After the first bytes arrived."""
RENEW_S = 8.0
PAUSE_S = 0.5
"""Longer ones end the flow: after them BBR measures for nothing."""


class Renewal:
    def __init__(self) -> None:
        self._acked_bytes = 0
        self._grew_s = float("-inf")
        self._due_s: float | None = None
        """None while nothing is sent, or the connection is free."""

    def is_due(self, held: bool, acked_bytes: int, queues: bool, now: float) -> bool:
        """Several times per second, with all bytes that arrived at the other side."""
        grows, self._acked_bytes = acked_bytes > self._acked_bytes, acked_bytes
        if grows:
            self._grew_s = now
        if not held or now - self._grew_s > PAUSE_S:
            self._due_s = None
        elif self._due_s is None:
            self._due_s = now + FLOWS_S
        elif grows and not queues and now >= self._due_s:
            self._due_s = now + RENEW_S
            return True
        return False
