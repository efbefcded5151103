"""Nim, a game of your own for the task ``sandbox``: one heap, each seat takes 1 to 3 sticks in turn, the last one wins.

Invariant: pure. The heap follows from the seed, and a reply that is no legal number changes nothing.
"""

from __future__ import annotations

from random import Random

from echo2.data.sandbox.replies import action_text
from echo2.data.sandbox.sandbox import Bot, Fault, Outcome, Turn
from echo2.errors import ConfigError

MOST = 3


def novice(heap: int, draw: Random, /) -> str:
    return str(draw.randint(1, min(MOST, heap)))


def expert(heap: int, draw: Random, /) -> str:
    """Leaves a multiple of four where it can."""
    return str(heap % (MOST + 1) or 1)


class Nim:
    """largest: sticks that a heap has at most."""

    seats = 2
    rules = f"Nim. Take 1 to {MOST} sticks; the last one wins a point."
    currency = "points"
    default_rule = "you take 1"
    fault_cost = 0.5
    measure = ("points_per_game", 1.0)

    def __init__(self, *, largest: int = 12) -> None:
        if not isinstance(largest, int) or not MOST < largest <= 1000:
            raise ConfigError(f"nim: largest must be an integer in {MOST + 1}..1000, got {largest!r}")
        self._largest = largest
        self._heap = self._first = self._seat = 0

    @property
    def bots(self) -> dict[str, Bot]:
        return {"novice": novice, "expert": expert}

    def reset(self, seed: int) -> Turn:
        self._heap = self._first = Random(f"nim/{seed}").randint(MOST + 1, self._largest)
        self._seat = 0
        return self._turn()

    def step(self, reply: str) -> Outcome | Fault:
        if not self._heap:
            raise ValueError("a game must be reset before it is played, and again when it is over")
        words, most = action_text(reply), min(MOST, self._heap)
        if words not in ("1", "2", "3"):
            return Fault("unclear", f"Your reply must be a number from 1 to {most}.")
        if int(words) > most:
            return Fault("illegal", f"You may take 1 to {most}.")
        self._heap -= int(words)
        self._seat = 1 - self._seat
        return Outcome(words, self._turn() if self._heap else None)

    def gain(self, seat: int) -> float:
        """Whoever would have to move when nothing is left has lost."""
        return 0.0 if self._heap else (-1.0 if seat == self._seat else 1.0)

    def likeness(self, seat: int) -> str:
        return f"seat {seat}, heap {self._first}"

    def _turn(self) -> Turn:
        legal = tuple(str(number) for number in range(1, min(MOST, self._heap) + 1))
        return Turn(self._seat, state=f"{self._heap} left.", view=self._heap, default="1", replies=legal)
