"""Who gets what of the pots.

Invariant: what is paid out is what was paid in. Each side pot is split on its own, its odd chips go to the first
winner left of the button, and chips nobody could match come back.

``pokerkit`` (0.7.7) folds losers' hands first and then joins the pots they left behind, which moves odd chips between
tied winners; so its betting is used and its payments are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.data.sandbox.poker.cards import value


def payments(
    paid: Sequence[int], live: Sequence[bool], holes: Sequence[Sequence[str]], board: Sequence[str]
) -> list[int]:
    """[places] chips each gets back.

    paid: [places] in the whole hand.  live: [places] not folded, at least one.  board: five cards if several are live.
    Places count from the left of the button.

    Example: 20, 50 and 100 paid, hands in that order of strength: 60, 60, 50.
    """
    values = {place: value([*holes[place], *board]) for place in _live(live)} if sum(live) > 1 else {}
    levels = sorted({paid[place] for place in _live(live)})
    # What a folded player paid above every live one belongs to the last pot.
    levels[-1] = max(paid)
    back = [0] * len(paid)
    floor = 0
    for level in levels:
        pot = sum(min(amount, level) - min(amount, floor) for amount in paid)
        able = [place for place in _live(live) if paid[place] > floor]
        best = max((values[place] for place in able), default=0) if len(able) > 1 else None
        winners = [place for place in able if best is None or values[place] == best]
        share, odd = divmod(pot, len(winners))
        for place in winners:
            back[place] += share
        for place in winners[:odd]:
            back[place] += 1
        floor = level
    return back


def _live(live: Sequence[bool]) -> list[int]:
    return [place for place, lives in enumerate(live) if lives]
