"""Peers that could not be dialled.

Invariant: who could not be dialled is remembered for a while, longer each time, and forgotten once it answers; so a
peer that cannot be dialled from here is neither planned as our parent again and again nor given up for ever. Pure.
"""

from __future__ import annotations

FIRST_S, MOST_S = 60.0, 3600.0
"""It is remembered for so long; doubles from failure to failure, from the first to the second."""


class Unreachable:
    def __init__(self) -> None:
        self._marked: dict[str, tuple[float, float]] = {}
        """By peer: until when, and for how long it was."""

    def failed(self, peer: str, now: float) -> None:
        until_s, lasted_s = self._marked.get(peer, (now, FIRST_S / 2))
        if now >= until_s:
            lasts_s = min(2 * lasted_s, MOST_S)
            self._marked[peer] = now + lasts_s, lasts_s

    def answered(self, peer: str) -> None:
        self._marked.pop(peer, None)

    def peers(self, now: float) -> list[str]:
        """By name."""
        return sorted(peer for peer, (until_s, _) in self._marked.items() if now < until_s)
