"""Three players by rule: two caricatures, and one that counts.

Invariant: a bot is a function of what its seat may know and of seeded random numbers, and what it says is legal.

- ``rock`` (tight, passive): plays strong cards only, calls with what it holds, seldom raises; folds to pressure.
- ``maniac`` (loose, aggressive): plays almost everything and bets or raises more often than not, whatever it holds.
- ``counter`` (by equity): deals the unseen cards a hundred times, calls when the price is right, raises for value, and
  bets at nobody's bet now and then whatever it holds.
"""

from __future__ import annotations

from random import Random

from echo2.data.sandbox.poker.actions import Action, Bounds
from echo2.data.sandbox.poker.cards import chen, equity
from echo2.data.sandbox.poker.text import View

ROCK_PLAYS, ROCK_RAISES = 9.0, 12.0
"""Chen points."""
ROCK_STAYS, ROCK_BETS = 0.62, 0.85
"""Equity against one random hand."""
MANIAC_PLAYS = 0.85
MANIAC_RAISES = 0.55
MANIAC_MOST_RAISES = 4
"""On one street; two maniacs would otherwise always end all-in."""
COUNTER_DRAWS = 100
COUNTER_BETS, COUNTER_RAISES = 0.05, 0.25
"""Equity above an even share of the pot that is worth a first bet, and as much again for each raise before."""
COUNTER_BLUFFS = 0.4
"""Share of weak hands it bets when it could check, while the pot is small."""
COUNTER_MARGIN = 0.04
"""Equity wanted above the pot odds, and again for each raise."""
SMALL_POT, BIG_POT_MARGIN = 4, 0.15
"""In a pot above so many big blinds somebody holds better than random cards: so much more equity is wanted."""


def rock(view: View, draw: Random, /) -> str:
    bounds = view.bounds
    if view.street == "preflop":
        points = chen(view.hole)
        if points >= ROCK_RAISES and view.raises < 2:
            return _raise(bounds, 3 * view.big_blind)
        return _call_or_fold(bounds, points >= ROCK_PLAYS or bounds.to_call * 2 <= view.big_blind)
    strength = equity(view.hole, view.board, max(1, view.rivals), COUNTER_DRAWS, draw)
    if strength >= ROCK_BETS and not view.raises:
        return _raise(bounds, bounds.facing + view.pot // 2)
    return _call_or_fold(bounds, strength >= ROCK_STAYS + 0.15 * (bounds.to_call > view.pot // 2))


def maniac(view: View, draw: Random, /) -> str:
    bounds = view.bounds
    luck = draw.random()
    if luck < MANIAC_RAISES and view.raises < MANIAC_MOST_RAISES:
        return _raise(bounds, bounds.facing + int(view.pot * draw.choice((0.5, 1.0, 1.5))))
    return _call_or_fold(bounds, luck < MANIAC_PLAYS)


def counter(view: View, draw: Random, /) -> str:
    bounds = view.bounds
    share = 1.0 / (1 + view.rivals)
    wins = equity(view.hole, view.board, max(1, view.rivals), COUNTER_DRAWS, draw)
    small = view.pot <= SMALL_POT * view.big_blind
    caution = 0.0 if small else BIG_POT_MARGIN
    bluffs = small and not bounds.to_call and draw.random() < COUNTER_BLUFFS
    if bluffs or wins >= share + COUNTER_BETS + COUNTER_RAISES * view.raises + caution:
        return _raise(bounds, bounds.facing + int(0.75 * view.pot))
    return _call_or_fold(bounds, wins >= view.pot_odds + COUNTER_MARGIN * (1 + view.raises) + caution)


BOTS = {"rock": rock, "maniac": maniac, "counter": counter}


def _raise(bounds: Bounds, total: int) -> str:
    """A bet or raise of about ``total``; a call or check where none is allowed."""
    if bounds.min_to is None or bounds.max_to is None:
        return _call_or_fold(bounds, True)
    amount = min(max(total, bounds.min_to), bounds.max_to)
    return f"Action: {Action('raise' if bounds.facing else 'bet', amount)}"


def _call_or_fold(bounds: Bounds, stays: bool) -> str:
    if not bounds.to_call:
        return "Action: check"
    return "Action: call" if stays else "Action: fold"
