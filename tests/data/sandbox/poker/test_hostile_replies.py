"""Tables at which seats say whatever comes to mind."""

from __future__ import annotations

from random import Random

import pytest

from echo2.data.sandbox.poker.game import Poker
from echo2.data.sandbox.sandbox import Fault, Outcome, Turn

JUNK = (
    "", " \n\t", "\0", "check", "fold", "call", "all-in", "bet", "raise", "raise to", "bet -5", "raise to -2147483648",
    "call -1", "raise to 0", "bet 0", "raise to 999999999", "raise to 99999999999999999999999", "bet 1e9", "bet 1.5",
    "raise to \u0663\u0660", "raise to ²⁰", "raise to \u2212" + "20", "Ｃａｌｌ", "ＦＯＬＤ", "je me couche", "跟注",
    "raise to 1,00", "raise to ,", "raise to $", "Action: Action: call", "Action: call\nAction: call", "action:call.",
    "Action: raise to 20 and fold", "<think>Action: call</think>", "<think>", "</think>Action: check", "call\u202e",
    "<|im_end|>\n<|im_start|>assistant\nAction: all-in", "raise to " + "9" * 5000, "Action: " * 1000, "🂡 all-in 🂡",
    "raise to 20\u0000", "RAISE TO 6", "bet 4 chips", "\ufeffcall", "raise to 0x10", "raise to 1_000", "i folds",
)  # fmt: skip


def whatever(turn: Turn, draw: Random) -> str:
    """Half of the time something legal, else junk, amounts of any size, or any characters."""
    luck = draw.random()
    if luck < 0.5:
        return draw.choice(turn.replies)
    if luck < 0.75:
        return draw.choice(JUNK)
    if luck < 0.9:
        verb = draw.choice(("bet", "raise to", "raise", "call", "Action: raise to", "Action: bet"))
        return f"{verb} {draw.choice((draw.randint(-10, 250), draw.randint(0, 10**12), -draw.randint(0, 10**12)))}"
    return "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x20, 0xD800)))) for _ in range(12))


@pytest.mark.parametrize("block", range(8))
def test_no_reply_loses_a_chip_or_moves_the_game_without_being_an_action(block: int) -> None:
    """2,000 hands of two to six seats: the gains of all seats and the pot are nothing together after every reply."""
    for number in range(block * 250, (block + 1) * 250):
        draw = Random(f"hostile/{number}")
        seats = draw.randint(2, 6)
        blind = draw.choice((1, 2, 50))
        stacks = [draw.randint(2 * blind + 1, 200 * blind) for _ in range(seats)]
        game = Poker(seats=seats, small_blind=blind, big_blind=2 * blind, stack=stacks)
        turn: Turn | None = game.reset(number)
        for _ in range(2000):
            if turn is None:
                break
            gains = [game.gain(seat) for seat in range(seats)]
            assert sum(gains) + turn.view.pot == 0
            reply = whatever(turn, draw)
            done = game.step(reply)
            if isinstance(done, Fault):
                assert [game.gain(seat) for seat in range(seats)] == gains, repr(reply)
                done = game.step(turn.default) if draw.random() < 0.3 else Outcome("", turn)
            assert isinstance(done, Outcome), repr(reply)
            turn = done.turn
        assert turn is None, number
        final = [game.gain(seat) for seat in range(seats)]
        assert sum(final) == 0
        assert all(-stack <= gain <= sum(stacks) - stack for gain, stack in zip(final, stacks, strict=True))
