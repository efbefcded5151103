from __future__ import annotations

from itertools import combinations

import pytest

from echo2.data.sandbox.catalogue import load_sandbox
from echo2.data.sandbox.moba.bots import BOTS
from echo2.data.sandbox.moba.game import LaneDuel
from echo2.data.sandbox.play import Faults, play
from echo2.data.sandbox.players import BotPlayer
from echo2.data.sandbox.sandbox import Fault, Outcome
from echo2.errors import ConfigError


def test_a_seat_chooses_without_knowing_the_others_choice() -> None:
    seen = set()
    for move in ("farm", "siege"):
        game = LaneDuel()
        game.reset(1)
        done = game.step(f"Action: {move}")
        assert isinstance(done, Outcome) and done.turn is not None and done.turn.seat == 1
        seen.add(done.turn.state)
    assert len(seen) == 1


def test_a_reply_that_is_no_move_changes_nothing() -> None:
    game = LaneDuel()
    turn = game.reset(1)
    for reply in ("dance", "", "farm and siege", "<think>farm"):
        assert isinstance(game.step(reply), Fault)
    assert game.reset(1) == turn


async def test_games_end_and_gains_sum_to_zero_whoever_plays() -> None:
    won = dict.fromkeys(BOTS, 0.0)
    for first, second in combinations(BOTS, 2):
        for seed in range(10):
            game = LaneDuel()
            players = [BotPlayer(BOTS[first], "0"), BotPlayer(BOTS[second], "1")]
            logs = await play(game, game.reset(seed), players, Faults(retries=0, price=1.0))
            assert all(sum(entry.reward for entry in log) == game.gain(seat) for seat, log in enumerate(logs))
            assert game.gain(0) + game.gain(1) == 0
            won[first] += game.gain(0)
            won[second] += game.gain(1)
    assert len(set(won.values())) == 3, "three strengths"
    assert won["farmer"] == max(won.values())


@pytest.mark.parametrize("settings", [{"ticks": 0}, {"ticks": "12"}, {"tick": 3}])
def test_wrong_settings_are_told_in_a_sentence(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"moba: ticks must be|correct its options"):
        load_sandbox("moba", settings)
