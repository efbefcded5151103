"""What simple ways to play win from each opponent: a table to read the results of training by.

``python experiments/table4/strategies.py`` plays rules that look at nothing but what is allowed, and the three bots, on
duplicate deals; no model is involved. Results go to ``strategies.json``, and are the same in each run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common

from echo2.data.sandbox.poker.bots import BOTS
from echo2.data.sandbox.poker.game import Poker
from echo2.data.sandbox.poker.text import View
from echo2.data.sandbox.sandbox import Fault
from echo2.data.sandbox.table import Game, compare

HERE = Path(__file__).parent
DEALS = 100
STACKS = (4, 20)
"""Chips; a big blind is two."""
SMALLEST = (4, "push", "rock")
Strategy = Callable[[View, Random], str]


def push(view: View, draw: Random) -> str:
    """All-in, whatever it holds."""
    return _most(view, "all-in")


def least(view: View, draw: Random) -> str:
    """The least bet or raise, whatever it holds."""
    return _most(view, "bet", "raise")


def stay(view: View, draw: Random) -> str:
    """Check or call."""
    return _most(view)


def chance(view: View, draw: Random) -> str:
    """Any kind of legal action: what the base model was taught."""
    return draw.choice(view.bounds.examples)


OPPONENTS: dict[str, Strategy] = {**BOTS, "chance": chance}
STRATEGIES: dict[str, Strategy] = {"push": push, "least": least, "stay": stay, **OPPONENTS}


def main() -> None:
    cases = [(stack, name, opponent) for stack in STACKS for name in STRATEGIES for opponent in OPPONENTS]
    common.write(HERE, {"rows": common.rows(row, cases)}, "strategies.json")


def row(case: tuple[int, str, str]) -> dict[str, Any]:
    stack, name, opponent = case
    games = [
        Game(opponent, deal, seat, gain(stack, deal, seat, name, opponent), replies=1, faults=0)
        for deal in range(DEALS)
        for seat in (0, 1)
    ]
    (found,) = compare(games, 2, "bb_per_100", 50.0)
    return {
        "stack": stack,
        "strategy": name,
        "opponent": opponent,
        "bb_per_100": found["bb_per_100"],
        "bb_per_100_ci95": found["bb_per_100_ci95"],
    }


def gain(stack: int, deal: int, seat: int, name: str, opponent: str) -> float:
    """Chips that a strategy wins in a seat of a deal."""
    game = Poker(stack=stack)
    players = [OPPONENTS[opponent], OPPONENTS[opponent]]
    players[seat] = STRATEGIES[name]
    draws = [Random(f"{deal}/{place}") for place in (0, 1)]
    turn = game.reset(deal)
    while True:
        done = game.step(players[turn.seat](turn.view, draws[turn.seat]))
        assert not isinstance(done, Fault), "strategies say what is legal"
        if done.turn is None:
            return game.gain(seat)
        turn = done.turn


def _most(view: View, *kinds: str) -> str:
    """The first legal action of these kinds; else a call or a check."""
    legal = view.bounds.examples
    return next(words for kind in (*kinds, "call", "check") for words in legal if words.startswith(kind))


if __name__ == "__main__":
    main()
