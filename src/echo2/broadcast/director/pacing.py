"""How fast parents may send, and when they may not be held back.

Invariant: only streams whose ends were seen going as fast as they can are held, at no less than the plan counts on and
no less than what others get; and from time to time nobody is, so that a line which became faster shows it. Pure.

TCP left to itself sends more than its line carries now and then, to see whether that has become faster. Where many
connections share an uplink that they fill, or acknowledgements share a busy one, queues grow and overflow, and whoever
lost packets never catches up, because its line is full anyway. Held at the measured rate, all finish together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median

from echo2.broadcast.plan.model import Plan, Stream

FREE_FIRST = 2
"""Telling transfers before anything is held."""
HELD = 8
"""Telling transfers after which one is free again."""
UNDER = 0.99
"""Of the measured rate: the best seconds of a free transfer are a little above what a line carries."""


class Pacing:
    """Whether the next transfer may be held."""

    def __init__(self) -> None:
        self._free = 0
        """Free transfers so far, up to those that come first."""
        self._held = 0
        """Held ones since the last free one."""

    @property
    def may_hold(self) -> bool:
        return self._free >= FREE_FIRST and self._held < HELD

    def count(self, held: bool) -> None:
        """A transfer that tells something of rates begins."""
        if held:
            self._held += 1
        else:
            self._free, self._held = min(self._free + 1, FREE_FIRST), 0


def paces(plan: Plan, knows: Callable[[str, str], bool]) -> dict[Stream, float]:
    """Most bytes per second, for the streams that can be held.  knows: of parent and child, what they can do."""
    gets: defaultdict[str, float] = defaultdict(float)
    for stream in plan.streams:
        gets[stream.child] += stream.rate_bytes_per_s
    usual = median(gets.values()) if gets else 0.0
    return {
        stream: UNDER * stream.rate_bytes_per_s * max(1.0, usual / gets[stream.child])
        for stream in plan.streams
        if stream.rate_bytes_per_s > 0 and knows(stream.parent, stream.child)
    }
