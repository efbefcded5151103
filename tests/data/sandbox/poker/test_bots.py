from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from echo2.data.sandbox.play import Faults, play
from echo2.data.sandbox.players import BotPlayer
from echo2.data.sandbox.poker.bots import BOTS
from echo2.data.sandbox.poker.game import Poker


async def gain(first: str, second: str, deals: int) -> float:
    """Big blinds per 100 hands of the first against the second, on duplicate deals with seats swapped."""
    won = 0.0
    for deal in range(deals):
        for seat, names in enumerate([(first, second), (second, first)]):
            game = Poker()
            players = [BotPlayer(BOTS[name], f"{deal}/{place}") for place, name in enumerate(names)]
            await play(game, game.reset(deal), players, Faults(retries=0, price=1.0))
            won += game.gain(seat)
    return 100 * won / 2 / (2 * deals)


@pytest.mark.parametrize("seats", [2, 6])
async def test_bots_say_what_is_legal_and_play_the_same_from_the_same_seed(seats: int) -> None:
    names = [*BOTS, *BOTS]
    for deal in range(6):
        logs = []
        for _ in range(2):
            game = Poker(seats=seats)
            players = [BotPlayer(BOTS[names[seat]], f"{deal}/{seat}") for seat in range(seats)]
            logs.append(await play(game, game.reset(deal), players, Faults(retries=0, price=1.0)))
            assert sum(game.gain(seat) for seat in range(seats)) == 0
        assert logs[0] == logs[1]
        assert not any(entry.fault for entries in logs[0] for entry in entries)


async def test_styles_differ() -> None:
    """How often each puts chips in freely, and how often it raises, over the same spots."""
    game = Poker()
    views = [game.reset(seed).view for seed in range(150)]
    share = {
        name: [sum(word in bot(view, Random(i)) for i, view in enumerate(views)) / 150 for word in ("fold", "raise")]
        for name, bot in BOTS.items()
    }
    assert share["maniac"][1] > 0.4 > share["counter"][1] > share["rock"][1]
    assert share["rock"][0] == 0.0  # half a blind more is cheap
    assert share["maniac"][0] > 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_strengths_differ() -> None:
    """The one that counts beats both caricatures."""
    won = {pair: await gain(*pair, deals=300) for pair in combinations(BOTS, 2)}
    assert won["rock", "counter"] < 0
    assert won["maniac", "counter"] < 0
