from __future__ import annotations

import pytest

from echo2.data.sandbox.table import Game, compare


def game(deal: int, seat: int, gain: float, opponent: str = "rock", faults: int = 0) -> Game:
    return Game(opponent, deal, seat, gain, replies=2, faults=faults)


def test_luck_of_cards_cancels_on_duplicate_deals() -> None:
    """Two deals, big blind 2: +50 and −48 are worth 1 a game, −30 and +34 are worth 2.

    Mean 1.5, standard deviation 0.7071 over two deals, half width 1.96 · 0.7071 / √2 = 0.98; a chip a game is 50.
    """
    played = [game(1, 0, 50), game(1, 1, -48), game(2, 0, -30, faults=1), game(2, 1, 34)]
    (row,) = compare(played, 2, "bb_per_100", 50.0)
    assert (row["opponent"], row["games"], row["deals"], row["gain_per_game"]) == ("rock", 4, 2, 1.5)
    assert row["bb_per_100"] == 75.0
    assert row["bb_per_100_ci95"] == pytest.approx((26.0, 124.0), abs=0.01)
    assert row["fault_share"] == 1 / 8


def test_a_deal_that_was_not_played_from_every_seat_is_left_out() -> None:
    played = [game(1, 0, 100), game(2, 0, 4), game(2, 1, 0)]
    (row,) = compare(played, 2, "bb_per_100", 50.0)
    assert (row["deals"], row["gain_per_game"], row["bb_per_100_ci95"]) == (1, 2.0, None)


def test_several_games_of_one_seat_and_deal_count_as_one() -> None:
    played = [game(1, 0, 0), game(1, 0, 4), game(1, 1, 6)]
    (row,) = compare(played, 2, "gold_lead", 1.0)
    assert row["gold_lead"] == 4.0


def test_each_opponent_has_a_row_in_order() -> None:
    rows = compare([game(1, 0, 1, "b"), game(1, 0, 1, "a")], 2, "gold_lead", 1.0)
    assert [row["opponent"] for row in rows] == ["b", "a"]
    assert rows[0]["gain_per_game"] is None


def test_two_players_are_compared_deal_by_deal() -> None:
    """Deals worth 1 and 2 against deals worth 0 and 2: 0.5 more, ± 1.96 · 0.7071 / √2; a third deal has no other."""
    ours = [game(1, 0, 50), game(1, 1, -48), game(2, 0, 2), game(2, 1, 2), game(3, 0, 90), game(3, 1, 90)]
    theirs = [game(1, 0, -5), game(1, 1, 5), game(2, 0, 4), game(2, 1, 0), game(3, 0, 1)]
    (row,) = compare(ours, 2, "gold_lead", 1.0, against=theirs)
    assert row["gold_lead_more"] == 0.5
    assert row["gold_lead_more_ci95"] == pytest.approx((0.5 - 0.98, 0.5 + 0.98), abs=0.001)
    (alone,) = compare(ours, 2, "gold_lead", 1.0, against=[])
    assert (alone["gold_lead_more"], alone["gold_lead_more_ci95"]) == (None, None)
