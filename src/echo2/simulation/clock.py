"""Time and identifiers in simulation.

Invariant: ``monotonic`` is the loop's virtual time and is true for everybody; ``wall`` may lie per machine, as real
clocks do, and nothing may depend on it (field report H12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EPOCH_S = 1_700_000_000.0
"""Wall time at virtual second 0."""


Skew = float | Callable[[float], float]
"""Seconds by which a wall clock is wrong: a number, or a function of virtual time for clocks that jump during a run."""


class VirtualClock:
    def __init__(self, skew_s: Skew = 0.0) -> None:
        self._skew_s = skew_s

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        now_s = self.monotonic()
        skew_s = self._skew_s(now_s) if callable(self._skew_s) else self._skew_s
        return EPOCH_S + now_s + skew_s


class CountedIds:
    """``lease-1``, ``lease-2`` … : guessable on purpose, equal in every run."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}

    def new(self, prefix: str) -> str:
        self._made[prefix] = self._made.get(prefix, 0) + 1
        return f"{prefix}-{self._made[prefix]}"
