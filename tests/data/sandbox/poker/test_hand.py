from __future__ import annotations

import pytest
from poker import ROYAL_BOARD, cards, deck, play_random_hand, say

from echo2.data.sandbox.poker.actions import read, settle
from echo2.data.sandbox.poker.hand import Hand
from echo2.data.sandbox.poker.pots import payments
from echo2.data.sandbox.sandbox import Fault

ANY_TWO = deck("", "", board="2c7d9hJsQc")
DULL = "2c7d9h3s4c"


def refused(hand: Hand, text: str) -> str:
    before = (hand.actor, hand.stacks, hand.in_front, hand.pot)
    found = settle(read(text), hand.bounds())  # type: ignore[arg-type]
    assert isinstance(found, Fault)
    assert (hand.actor, hand.stacks, hand.in_front, hand.pot) == before
    return found.reason


def test_g01_heads_up_the_button_posts_the_small_blind_acts_first_before_the_flop_and_last_after() -> None:
    hand = Hand([1000, 1000], (10, 20), ANY_TWO)
    assert (hand.in_front, hand.actor) == ((20, 10), 1)
    say(hand, "call")
    assert hand.actor == 0
    say(hand, "check")
    for street in ("flop", "turn", "river"):
        assert (hand.street, hand.actor) == (street, 0)
        say(hand, "check")
        assert hand.actor == 1
        say(hand, "check")
    assert hand.actor is None


@pytest.mark.parametrize("raiser_stack", [200, 16])
def test_g02_a_short_all_in_does_not_reopen_the_betting(raiser_stack: int) -> None:
    """Small blind, big blind, under the gun, button."""
    hand = Hand([19, 200, raiser_stack, 200], (1, 2), deck("", "", "", "", board=DULL))
    say(hand, "raise to 16")
    say(hand, "call")
    say(hand, "all-in")
    say(hand, "call")
    if raiser_stack == 200:
        assert (hand.actor, hand.bounds().to_call, hand.bounds().min_to) == (2, 3, None)
        assert "You may not raise now, only fold, call 3" in refused(hand, "raise 50")
        say(hand, "call")
    assert (hand.actor, hand.bounds().to_call, hand.bounds().min_to) == (3, 3, None)
    assert "You may not raise now" in refused(hand, "all-in")


def test_g04_the_least_raise_is_the_last_one_again() -> None:
    hand = Hand([10_000, 10_000], (50, 100), ANY_TWO)
    say(hand, "raise to 200")
    say(hand, "raise to 2179")
    assert hand.bounds().min_to == 4158
    assert "4158 to 10000, got 4157" in refused(hand, "raise to 4157")
    say(hand, "raise to 4200")
    assert hand.in_front == (2179, 4200)


def test_g04_the_ladder_of_least_raises() -> None:
    hand = Hand([1000, 1000], (10, 25), ANY_TWO)
    for least in (50, 75, 100, 125):
        assert hand.bounds().min_to == least
        say(hand, f"raise to {least}")


@pytest.mark.parametrize("words", ["raise 20", "raise to 20"])
def test_g04_an_amount_is_a_total_whatever_lies_in_front(words: str) -> None:
    hand = Hand([200, 200], (2, 4), ANY_TWO)
    say(hand, "call")
    assert (hand.actor, hand.in_front[0], hand.stacks[0]) == (0, 4, 196)
    say(hand, words)
    assert (hand.in_front[0], hand.stacks[0]) == (20, 180)


def test_g04_a_covered_opponent_does_not_lower_the_least_raise_and_the_excess_comes_back() -> None:
    hand = Hand([200, 1000], (10, 20), deck("2h3h", "AcAd", board="7d8h9sJcQd"))
    say(hand, "raise to 100")
    say(hand, "raise to 180")
    assert hand.bounds().min_to == 260
    say(hand, "raise to 260")
    say(hand, "call")
    assert hand.stacks == (0, 1200)


def test_g06_three_all_ins_make_a_main_and_a_side_pot_and_the_rest_comes_back() -> None:
    hand = Hand([20, 50, 100], (1, 2), deck("AcAd", "KcKd", "QcQd", board=DULL))
    for _ in range(3):
        if hand.actor is not None:
            say(hand, "all-in")
    assert hand.stacks == (60, 60, 50)


@pytest.mark.parametrize(("holes", "stacks"), [(("AcAd", "KcKd"), (196, 4)), (("KcKd", "AcAd"), (0, 200))])
def test_g06_an_over_shove_wins_or_loses_what_the_other_could_lose(
    holes: tuple[str, str], stacks: tuple[int, int]
) -> None:
    hand = Hand([98, 102], (1, 2), deck(*holes, board=DULL))
    say(hand, "all-in")
    say(hand, "call")
    assert hand.stacks == stacks


def test_g08_the_odd_chip_goes_to_the_first_tied_seat_left_of_the_button() -> None:
    three = Hand([100, 100, 100], (1, 2), deck("", "", "", board=ROYAL_BOARD))
    for words in ("call", "fold", "check", *["check"] * 6):
        say(three, words)
    assert three.stacks == (99, 101, 100)
    four = Hand([100] * 4, (1, 3), deck("", "", "", "", board=ROYAL_BOARD))
    for words in ("call", "call", "fold", "check", *["check"] * 9):
        say(four, words)
    assert four.stacks == (99, 101, 100, 100)
    even = Hand([10_100] * 3, (1, 2), deck("", "", "", board=ROYAL_BOARD))
    for words in ("all-in", "call", "call"):
        say(even, words)
    assert even.stacks == (10_100, 10_100, 10_100)


def test_g08_each_side_pot_is_split_on_its_own() -> None:
    """Main pot 3 · 5 = 15 to the two who tie, side pots 144 and 9 likewise; 6 come back.

    Joined, as pokerkit joins them once the losers' hands are folded, they would make 168 without an odd chip.
    """
    paid, holes = [3, 42, 45, 39, 45], [cards(hole) for hole in ("2h6h", "Qc3s", "Qh5h", "7s2c", "4h9c")]
    back = payments(paid, [True] * 5, holes, cards("QsQdTsKc4s"))
    assert back == [0, 8 + 72 + 5, 7 + 72 + 4 + 6, 0, 0]


def test_what_a_folded_player_paid_above_the_others_goes_with_the_last_pot() -> None:
    holes = [cards("AcAd"), cards("KcKd"), cards("7h8h")]
    assert payments([20, 50, 60], [True, True, False], holes, cards(DULL)) == [60, 70, 0]
    assert payments([20, 50, 60], [False, True, False], holes, []) == [0, 130, 0]


@pytest.mark.parametrize("block", range(8))
def test_chips_are_conserved_and_pots_go_where_pokerkit_sends_them(block: int) -> None:
    """2,000 hands of two to six seats, legal actions at random: both evaluators agree on every showdown."""
    for number in range(block * 250, (block + 1) * 250):
        play_random_hand(number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_chips_are_conserved_in_a_hundred_thousand_hands(block: int) -> None:
    """Every showdown by our own count, one hand in ten by pokerkit's, too, which takes most of the time."""
    for number in range(block * 5000, (block + 1) * 5000):
        play_random_hand(number, compared=10)
