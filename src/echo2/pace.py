"""How long work takes that is only rehearsed.

Invariant: a duration is a function of its pace and the caller's random numbers; ``working_sleep`` counts only time in
which this process could have worked, so a stopped or starved process falls behind here as it would with real work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from time import monotonic

import msgspec

_SLICE_S = 0.05
"""Work is done in pieces; a piece counts for twice its length at most, whatever the clock did meanwhile."""

Sleep = Callable[[float], Awaitable[None]]


class Pace(msgspec.Struct, frozen=True):
    median_s: float = 0.0
    spread: float = 0.0
    """Log-normal sigma."""

    def draw_s(self, random: Random) -> float:
        return self.median_s * random.lognormvariate(0.0, self.spread) if self.median_s else 0.0


async def working_sleep(
    seconds: float, *, clock: Callable[[], float] = monotonic, sleep: Sleep = asyncio.sleep
) -> None:
    """Take ``seconds`` of this process's time."""
    left_s = seconds
    while left_s > 0:
        piece_s = min(left_s, _SLICE_S)
        began_s = clock()
        await sleep(piece_s)
        left_s -= min(max(clock() - began_s, piece_s), 2 * piece_s)
