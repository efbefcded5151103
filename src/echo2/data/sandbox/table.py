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

from echo2.data.task import Played

NORMAL_95 = 1.959964
"""Half width of a 95 % interval in standard errors."""


class Game(msgspec.Struct, frozen=True):
    opponent: str
    deal: int
    seat: int
    gain: float
    replies: int
    faults: int


def games_of(played: Sequence[Played]) -> list[Game]:
    """Evaluated episodes as games; recorded ones are nobody's."""
    return [
        Game(
            opponent=" + ".join(sorted(set(omega["opponents"]))),
            deal=omega["deal"],
            seat=omega["seat"],
            gain=omega["gain"],
            replies=len(omega["rewards"]),
            faults=omega["faults"],
        )
        for _, _, omega in played
        if "opponents" in omega
    ]


def compare(
    games: Sequence[Game], seats: int, measure: str, factor: float, against: Sequence[Game] | None = None
) -> list[dict[str, Any]]:
    """One row per opponent, in order of first appearance.

    measure, factor: what people compare, and how much of it a gain of 1 per game is: ``bb_per_100``, 100/big blind.
    against: another player's games of the same deals; rows then tell what ours has more, deal by deal.
    """
    by_opponent = _by_opponent(games)
    theirs = _by_opponent(against or ())
    rows = []
    for opponent, played in by_opponent.items():
        row = _row(opponent, played, seats, measure, factor)
        if against is not None:
            worth, other = _worth(played, seats), _worth(theirs.get(opponent, []), seats)
            more = _figures([worth[deal] - other[deal] for deal in worth if deal in other], factor)
            row |= {f"{measure}_more": more[0], f"{measure}_more_ci95": more[1]}
        rows.append(row)
    return rows


def _by_opponent(games: Sequence[Game]) -> dict[str, list[Game]]:
    found: dict[str, list[Game]] = {}
    for game in games:
        found.setdefault(game.opponent, []).append(game)
    return found


def _worth(games: Sequence[Game], seats: int) -> dict[int, float]:
    """Mean gain over the seats of each deal that was played from all of them."""
    deals: dict[int, dict[int, list[float]]] = {}
    for game in games:
        deals.setdefault(game.deal, {}).setdefault(game.seat, []).append(game.gain)
    return {deal: fmean(map(fmean, by_seat.values())) for deal, by_seat in deals.items() if len(by_seat) == seats}


def _figures(values: Sequence[float], factor: float) -> tuple[float | None, tuple[float, float] | None]:
    """Mean and 95 % interval, times ``factor``; None where there are too few values."""
    if not values:
        return None, None
    mean = fmean(values)
    if len(values) == 1:
        return factor * mean, None
    half = NORMAL_95 * stdev(values) / len(values) ** 0.5
    return factor * mean, (factor * (mean - half), factor * (mean + half))


def _row(opponent: str, games: Sequence[Game], seats: int, measure: str, factor: float) -> dict[str, Any]:
    worth = list(_worth(games, seats).values())
    measured, interval = _figures(worth, factor)
    replies = sum(game.replies for game in games)
    return {
        "opponent": opponent,
        "games": len(games),
        "deals": len(worth),
        "gain_per_game": fmean(worth) if worth else None,
        measure: measured,
        f"{measure}_ci95": interval,
        "fault_share": sum(game.faults for game in games) / replies if replies else None,
    }
