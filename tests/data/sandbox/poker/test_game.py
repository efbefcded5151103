from __future__ import annotations

import pytest
from poker import deck

from echo2.data.sandbox.catalogue import load_sandbox
from echo2.data.sandbox.play import Faults, briefing
from echo2.data.sandbox.poker.game import Poker
from echo2.data.sandbox.sandbox import Fault, Outcome, Turn
from echo2.errors import ConfigError


class Stacked(Poker):
    """Deals what it is told, then what the seed says."""

    hands: tuple[list[str], ...] = ()

    def deck(self, seed: int, number: int) -> list[str]:
        return self.hands[number] if number < len(self.hands) else super().deck(seed, number)


def said(game: Poker, text: str) -> Turn | None:
    done = game.step(text)
    assert isinstance(done, Outcome), done
    return done.turn


def test_a_state_shows_hand_board_pot_odds_and_what_happened() -> None:
    game = Stacked(small_blind=10, big_blind=20, stack=1000)
    game.hands = (deck("AhKd", "2c3c", board="QsTh2d7c7d"),)
    game.reset(0)
    said(game, "call")
    turn = said(game, "check")
    assert turn is not None
    turn = said(game, "bet 20")
    assert turn is not None and turn.seat == 0
    turn = said(game, "raise to 60")
    assert turn is not None
    assert turn.state == (
        "Flop, button: raise to 60.\n"
        "Hand: [Ah, Kd], Board: [Qs, Th, 2d], Pot: 120\n"
        "Flop, you are big blind: 960 behind, 20 in front.\n"
        "Button: 920 behind, 60 in front.\n"
        "To call: 40. Pot odds: 25.0 %.\n"
        "You may: fold, call 40, raise to 100 to 980, all-in."
    )
    assert (game.gain(0), game.gain(1)) == (-80.0, -40.0)
    assert "2c" not in turn.state


def test_the_prompt_says_what_amounts_mean_and_what_a_fault_costs() -> None:
    told = briefing(Poker(), Faults(retries=1, price=Poker().fault_cost))
    assert "N is the total you will then have in front of you on this street" in told
    assert "costs 2 chips and you are asked once more; then you check if that is free, and fold if it is not." in told
    assert "costs 2 chips; then you check" in briefing(Poker(), Faults(0, 2.0))
    assert "asked again, 3 times at most; then" in briefing(Poker(), Faults(3, 2.0))


@pytest.mark.parametrize(
    ("bust", "button", "big_blind"),
    [(0, 2, 1), (1, 2, 0), (2, 1, 0)],
)
def test_g01_a_table_that_shrinks_to_two_seats_gets_the_order_right(bust: int, button: int, big_blind: int) -> None:
    """Seat 0 had the button, 1 and 2 the blinds; then button first before the flop, last after, no big blind twice."""
    stacks = [100, 100, 100]
    stacks[bust] = 20
    winner = (bust + 1) % 3
    other = 3 - bust - winner
    game = Stacked(seats=3, stack=stacks, hands=2, carry=True, big_blind=2, small_blind=1)
    holes = {bust: "KcKd", winner: "AcAd", other: "2h3h"}
    game.hands = (deck(holes[1], holes[2], holes[0], board="7c8d9hJsQc"),)
    turn: Turn | None = game.reset(5)
    while turn is not None and "Hand over" not in turn.state:
        dear = turn.view.bounds.to_call > 0
        turn = said(
            game, "all-in" if turn.seat == bust else "check" if not dear else "call" if turn.seat == winner else "fold"
        )
    for words, seat, position in (("call", button, "button"), ("check", big_blind, "big blind")):
        assert turn is not None
        assert (turn.seat, turn.view.position, turn.view.street) == (seat, position, "preflop")
        turn = said(game, words)
    for seat in (big_blind, button):
        assert turn is not None
        assert (turn.seat, turn.view.street) == (seat, "flop")
        turn = said(game, "check")


def test_g09_an_illegal_reply_leaves_the_game_as_it_was() -> None:
    game = Poker()
    game.reset(3)
    before = (game.gain(0), game.gain(1))
    for reply in ("check", "bet 30", "raise", "I won't raise 100, I fold", "", "je me couche"):
        assert isinstance(game.step(reply), Fault)
    assert (game.gain(0), game.gain(1)) == before
    done = game.step("raise to 6")
    assert isinstance(done, Outcome)
    assert done.action == "Action: raise to 6"


def test_the_same_seed_deals_the_same_cards_to_the_same_seats_whoever_plays() -> None:
    first, second = Poker(seats=4), Poker(seats=4)
    assert first.reset(7) == second.reset(7)
    assert said(first, "fold") != said(second, "all-in")
    assert first.likeness(2) == second.likeness(2)
    assert first.reset(7) == second.reset(7) != first.reset(8)


def test_several_hands_move_the_button_and_gains_sum_to_zero() -> None:
    game = Poker(seats=3, hands=4, stack=50)
    turn: Turn | None = game.reset(1)
    buttons = []
    while turn is not None:
        if turn.view.street == "preflop" and turn.view.position == "button" and turn.view.raises == 0:
            buttons.append(turn.seat)
        turn = said(game, "call" if turn.view.bounds.to_call else "check")
    assert buttons == [0, 1, 2, 0]
    assert sum(game.gain(seat) for seat in range(3)) == 0
    with pytest.raises(ValueError, match="reset"):
        game.step("call")


@pytest.mark.parametrize("hands", [30])
def test_a_game_that_is_carried_on_ends_when_one_has_all_chips(hands: int) -> None:
    game = Poker(seats=3, hands=hands, stack=6, carry=True)
    turn: Turn | None = game.reset(2)
    while turn is not None:
        words = "call" if turn.view.bounds.to_call else "check"
        turn = said(game, words if turn.view.bounds.min_to is None else "all-in")
    assert sum(game.gain(seat) for seat in range(3)) == 0
    assert max(game.gain(seat) for seat in range(3)) == 12


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seats": 7}, "seats must be an integer in 2..6"),
        ({"seats": 1}, "seats must be an integer in 2..6"),
        ({"small_blind": 3}, "small_blind must be at most big_blind"),
        ({"stack": 2}, "stack must be more than a big blind"),
        ({"stack": [100, 100, 100]}, "one for each of the 2 seats"),
        ({"stak": 100}, "correct its options"),
        ({"carry": 1}, "carry must be true or false"),
    ],
)
def test_wrong_settings_are_told_in_a_sentence(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_sandbox("poker", settings)
