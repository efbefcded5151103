"""Comparing players: gain per opponent, with intervals that duplicate deals make narrow.

Invariant: a deal counts only when it was played from every seat; its worth is the mean over its seats, so the luck of
cards and of position, which is the same for whoever plays it, cancels in a comparison and shrinks the interval. Deals
are the independent draws of the 95 % interval, never single games.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec

NORMAL_95 = 1.959964
"""Half width of a 95 % interval in standard errors."""


class Game(msgspec.Struct, frozen=True):
    opponent: str
    deal: int
    seat: int
    gain: float
    replies: int
    faults: int


def compare(games: Sequence[Game], seats: int, measure: str, factor: float) -> list[dict[str, Any]]:
    """One row per opponent, in order of first appearance.

    measure, factor: what people compare, and how much of it a gain of 1 per game is: ``bb_per_100``, 100/big blind.
    """
    by_opponent: dict[str, list[Game]] = {}
    for game in games:
        by_opponent.setdefault(game.opponent, []).append(game)
    return [_row(opponent, played, seats, measure, factor) for opponent, played in by_opponent.items()]


def _row(opponent: str, games: Sequence[Game], seats: int, measure: str, factor: float) -> dict[str, Any]:
    deals: dict[int, dict[int, list[float]]] = {}
    for game in games:
        deals.setdefault(game.deal, {}).setdefault(game.seat, []).append(game.gain)
    worth = [fmean(map(fmean, by_seat.values())) for by_seat in deals.values() if len(by_seat) == seats]
    mean = fmean(worth) if worth else None
    half = NORMAL_95 * stdev(worth) / len(worth) ** 0.5 if len(worth) > 1 else None
    replies = sum(game.replies for game in games)
    return {
        "opponent": opponent,
        "games": len(games),
        "deals": len(worth),
        "gain_per_game": mean,
        measure: None if mean is None else factor * mean,
        f"{measure}_ci95": None if mean is None or half is None else (factor * (mean - half), factor * (mean + half)),
        "fault_share": sum(game.faults for game in games) / replies if replies else None,
    }
