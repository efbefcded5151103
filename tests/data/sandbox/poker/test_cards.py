from __future__ import annotations

from random import Random

import pytest
from poker import cards
from pokerkit import StandardHighHand

from echo2.data.sandbox.poker.cards import DECK, chen, equity, shuffled, value

LADDER = (
    "AhKdJc9s7h5d3c", "2h2dKcJs9h7d5c", "AhAdKcJs9h7d5c", "3h3d2c2sAh9d7c", "AhAdKcKs9h7d5c", "2h2d2cKsJh9d7c",
    "Ah2d3c4s5hKdJc", "2h3d4c5s6hAdAc", "AhKdQcJsTh2d3c", "2h3h4h5h7hAdKc", "AhKhQhJh9h2d2c", "2h2d2c3s3hAdKc",
    "2h2d2c2sAhKdQc", "Ah2h3h4h5hKdKc", "AhKhQhJhTh2d2c",
)  # fmt: skip
"""Seven cards each, weakest first."""


def test_the_kinds_of_hands_are_in_order() -> None:
    values = [value(cards(text)) for text in LADDER]
    assert values == sorted(values)
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("block", range(4))
def test_the_evaluator_and_pokerkit_agree_on_showdowns(block: int) -> None:
    """Neither knows of the other: 1,000 showdowns of random cards."""
    for number in range(block * 250, (block + 1) * 250):
        deck = shuffled(f"showdown/{number}")
        board, first, second = deck[:5], deck[5:7], deck[7:9]
        ours = value([*board, *first]), value([*board, *second])
        theirs = [StandardHighHand.from_game("".join(hole), "".join(board)) for hole in (first, second)]
        assert (ours[0] > ours[1], ours[0] == ours[1]) == (theirs[0] > theirs[1], theirs[0] == theirs[1]), deck[:9]


@pytest.mark.parametrize("count", [5, 6, 7])
def test_the_evaluator_agrees_on_close_hands_of_a_short_deck(count: int) -> None:
    """Few ranks and suits make flushes, full houses and ties common."""
    short = [card for card in DECK if card[0] in "23459A" and card[1] in "cdh"]
    draw = Random(count)
    for _ in range(150):
        first, second = draw.sample(short, count), draw.sample(short, count)
        theirs = [StandardHighHand.from_game("".join(hand)) for hand in (first, second)]
        ours = value(first), value(second)
        assert (ours[0] > ours[1], ours[0] == ours[1]) == (theirs[0] > theirs[1], theirs[0] == theirs[1])


def test_equity_is_near_what_tables_say() -> None:
    """Aces against one random hand win 85.2 %, seven-two offsuit 34.6 % (ties halved)."""
    assert equity(("Ac", "Ad"), (), 1, 1500, Random(1)) == pytest.approx(0.852, abs=0.03)
    assert equity(("7c", "2d"), (), 1, 1500, Random(2)) == pytest.approx(0.346, abs=0.04)
    assert equity(("As", "Ks"), cards("QsJsTs2d3c"), 3, 10, Random(3)) == 1.0


@pytest.mark.parametrize(
    ("hole", "points"),
    [
        (("Ac", "Ad"), 20),
        (("As", "Ks"), 12),
        (("Ts", "Js"), 9),
        (("5c", "7c"), 5.5),
        (("2c", "7d"), -1.5),
        (("2c", "2d"), 5),
    ],
)
def test_chen_points_are_those_of_the_book(hole: tuple[str, str], points: float) -> None:
    assert chen(hole) == points
