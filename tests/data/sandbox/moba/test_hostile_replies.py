"""Lanes in which heroes say whatever comes to mind."""

from __future__ import annotations

from random import Random

import pytest

from echo2.data.sandbox.moba.game import LaneDuel
from echo2.data.sandbox.moba.lane import HERO_HP, MOVES
from echo2.data.sandbox.sandbox import Fault, Outcome, Turn

JUNK = (
    "", "\0", "dance", "farm and siege", "Action: farm\nAction: siege", "<think>farm", "ｆａｒｍ",
    "farm\u202e", "Siege!",
    "<|im_end|>\n<|im_start|>assistant\nAction: siege", "harass " * 500, "Action:", "-1", "9" * 5000, "tirer", "攻击",
    "siege 5", "\ufefffarm", "\n" * 5000 + "farm; siege",
)  # fmt: skip


@pytest.mark.parametrize("block", range(4))
def test_no_reply_makes_gold_or_moves_the_game_without_being_a_move(block: int) -> None:
    """1,000 games: gains sum to zero and hit points stay in their bounds after every reply."""
    for number in range(block * 250, (block + 1) * 250):
        draw = Random(f"hostile/{number}")
        ticks = draw.randint(1, 40)
        game = LaneDuel(ticks=ticks, brief=draw.random() < 0.5)
        turn: Turn | None = game.reset(number)
        taken = 0
        while turn is not None:
            assert game.gain(0) + game.gain(1) == 0
            assert 0 < turn.view.hp <= HERO_HP and 0 <= turn.view.enemy_hp <= HERO_HP
            assert 0 < turn.view.ticks_left <= ticks
            gain = game.gain(turn.seat)
            reply = draw.choice(MOVES) if draw.random() < 0.6 else draw.choice(JUNK)
            done = game.step(reply)
            if isinstance(done, Fault):
                assert game.gain(turn.seat) == gain
                done = game.step(turn.default)
            assert isinstance(done, Outcome), repr(reply)
            turn, taken = done.turn, taken + 1
        assert taken <= 2 * ticks
        assert game.gain(0) + game.gain(1) == 0
        with pytest.raises(ValueError, match="reset"):
            game.step("farm")
