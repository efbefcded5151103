"""Cards, and the value of seven of them.

Invariant: written without ``pokerkit``, so that each checks the other; ``value`` orders hands as the rules do, equal
hands get equal values.

A card is two characters, rank and suit: ``Ah``. Its number is 4 · rank + suit, rank 0 (deuce) to 12 (ace).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

RANKS = "23456789TJQKA"
SUITS = "cdhs"
DECK = tuple(rank + suit for rank in RANKS for suit in SUITS)
_NUMBER = {card: number for number, card in enumerate(DECK)}
WHEEL = 0b1_0000_0000_1111
"""Ace, two, three, four, five."""

STRAIGHT_FLUSH, QUADS, FULL_HOUSE, FLUSH, STRAIGHT, TRIPS, TWO_PAIRS, PAIR, HIGH_CARD = range(8, -1, -1)


def shuffled(seed: str) -> list[str]:
    deck = list(DECK)
    Random(seed).shuffle(deck)
    return deck


def rank(card: str) -> int:
    return _NUMBER[card] >> 2


def value(cards: Sequence[str]) -> int:
    """[5..7] distinct cards → the best five-card hand's value; higher wins."""
    counts = [0] * 13
    suits = [0] * 4
    for card in cards:
        number = _NUMBER[card]
        counts[number >> 2] += 1
        suits[number & 3] |= 1 << (number >> 2)
    flush = next((ranks for ranks in suits if ranks.bit_count() >= 5), 0)
    if flush and (top := _straight(flush)) is not None:
        return _packed(STRAIGHT_FLUSH, [top])
    by_count = sorted((r for r in range(13) if counts[r]), key=lambda r: (counts[r], r), reverse=True)
    first = counts[by_count[0]]
    second = counts[by_count[1]] if len(by_count) > 1 else 0
    if first == 4:
        return _packed(QUADS, [by_count[0], max(by_count[1:])])
    if first == 3 and second >= 2:
        return _packed(FULL_HOUSE, [by_count[0], max(r for r in by_count[1:] if counts[r] >= 2)])
    if flush:
        return _packed(FLUSH, [r for r in range(12, -1, -1) if flush >> r & 1][:5])
    present = sum(1 << r for r in by_count)
    if (top := _straight(present)) is not None:
        return _packed(STRAIGHT, [top])
    if first == 3:
        return _packed(TRIPS, by_count[:3])
    if first == 2 and second == 2:
        return _packed(TWO_PAIRS, [*by_count[:2], max(by_count[2:])])
    if first == 2:
        return _packed(PAIR, by_count[:4])
    return _packed(HIGH_CARD, by_count[:5])


def _straight(ranks: int) -> int | None:
    """Rank of the top card of the best straight among the bits; None where there is none."""
    for top in range(12, 3, -1):
        if (ranks >> (top - 4)) & 0b11111 == 0b11111:
            return top
    return 3 if ranks & WHEEL == WHEEL else None


def _packed(kind: int, ranks: Sequence[int]) -> int:
    packed = kind
    for position in range(5):
        packed = packed << 4 | (ranks[position] if position < len(ranks) else 0)
    return packed


def equity(hole: Sequence[str], board: Sequence[str], others: int, draws: int, random: Random) -> float:
    """Share of the pot that a hand wins on average against ``others`` random hands, by ``draws`` random deals."""
    rest = [card for card in DECK if card not in hole and card not in board]
    missing = 5 - len(board)
    won = 0.0
    for _ in range(draws):
        drawn = random.sample(rest, missing + 2 * others)
        whole = [*board, *drawn[:missing]]
        mine = value([*hole, *whole])
        theirs = [value([*drawn[i : i + 2], *whole]) for i in range(missing, len(drawn), 2)]
        best = max(theirs)
        if mine > best:
            won += 1.0
        elif mine == best:
            won += 1.0 / (1 + theirs.count(best))
    return won / draws


def chen(hole: Sequence[str]) -> float:
    """Bill Chen's points of a starting hand: 20 for aces, about -1 for seven-two (Hold'em Excellence, 2008)."""
    high, low = sorted((rank(card) for card in hole), reverse=True)
    points = {12: 10.0, 11: 8.0, 10: 7.0, 9: 6.0}.get(high, (high + 2) / 2)
    if high == low:
        return max(5.0, points * 2)
    if hole[0][1] == hole[1][1]:
        points += 2
    gap = high - low - 1
    points -= (0, 1, 2, 4, 5)[min(gap, 4)]
    if gap <= 1 and high < 10:
        points += 1
    return points
