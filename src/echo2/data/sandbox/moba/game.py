"""A lane duel as a sandbox: last hits, gold, towers, respawns.

Invariant: a seat chooses without knowing what the other chose in the same tick, although they are asked one after the
other.
"""

from __future__ import annotations

from echo2.data.sandbox.moba.bots import BOTS
from echo2.data.sandbox.moba.lane import (
    FARM_DAMAGE,
    HARASS_DAMAGE,
    HEAL,
    HERO_HP,
    KILL_GOLD,
    LAST_HIT_GOLD,
    MOVES,
    RESPAWN_TICKS,
    SIEGE_DAMAGE,
    TOWER_DAMAGE,
    TOWER_GOLD,
    TOWER_HP,
    Lane,
    Move,
)
from echo2.data.sandbox.moba.view import View, brief_text, state_text
from echo2.data.sandbox.replies import action_text
from echo2.data.sandbox.sandbox import Bot, Fault, Outcome, Turn
from echo2.errors import ConfigError

MAX_TICKS = 1000
FAULT_COST = 10.0
_DEFAULT = "Action: hold"


class LaneDuel:
    """ticks: length of a game in which no tower falls.  brief: rules and states of a line, for short contexts."""

    seats = 2

    def __init__(self, *, ticks: int = 12, brief: bool = False) -> None:
        if not isinstance(ticks, int) or isinstance(ticks, bool) or not 1 <= ticks <= MAX_TICKS:
            raise ConfigError(f"moba: ticks must be an integer in 1..{MAX_TICKS}, got {ticks!r}")
        if not isinstance(brief, bool):
            raise ConfigError(f"moba: brief must be true or false, got {brief!r}")
        self._ticks, self._brief = ticks, brief
        self._lane: Lane | None = None
        self._chosen: dict[int, Move] = {}
        self._news: list[str] = []
        self._start = 0

    @property
    def rules(self) -> str:
        if self._brief:
            return f"Two heroes, one lane: have more gold (g) and save your tower (t). Say {', '.join(MOVES)}."
        return (
            "You play a hero in a lane against another hero; have more gold than it at the end. Both choose at the same"
            f" time. farm: hit the enemy's front creep for {FARM_DAMAGE}; the hit that kills it brings {LAST_HIT_GOLD}"
            f" gold. Creeps lose 1 each tick by themselves. harass: hit the enemy hero for {HARASS_DAMAGE}, unless it"
            f" retreats; its creeps hit back for 1. A kill is worth {KILL_GOLD} gold, and the fallen hero is away for"
            f" {RESPAWN_TICKS} ticks. siege: hit the enemy's tower for {SIEGE_DAMAGE}; it hits back for {TOWER_DAMAGE}."
            f" A fallen tower is worth {TOWER_GOLD} gold and ends the game. retreat: recover {HEAL}. hold: do nothing."
            " Reply with one line: 'Action: ' and one of farm, harass, siege, retreat, hold."
        )

    @property
    def currency(self) -> str:
        return "gold"

    @property
    def default_rule(self) -> str:
        return "you hold"

    @property
    def fault_cost(self) -> float:
        return FAULT_COST

    @property
    def measure(self) -> tuple[str, float]:
        return "gold_lead", 1.0

    @property
    def bots(self) -> dict[str, Bot]:
        return dict(BOTS)

    def reset(self, seed: int) -> Turn:
        self._lane = Lane(f"moba/{seed}", self._ticks)
        self._chosen, self._news = {}, ["", ""]
        self._start = self._lane.sides[0].creep
        turn = self._turn()
        assert turn is not None, "both heroes stand in the lane at the beginning"
        return turn

    def step(self, reply: str) -> Outcome | Fault:
        seat = self._to_choose()
        if seat is None:
            raise ValueError("a game must be reset before it is played, and again when it is over")
        words = action_text(reply)
        move = next((move for move in MOVES if move == words), None)
        if move is None:
            return Fault("unclear", "Your reply must hold exactly one line of the form 'Action: farm'.")
        self._chosen[seat] = move
        return Outcome(f"Action: {move}", self._turn())

    def gain(self, seat: int) -> float:
        return float(self._playing().lead(seat))

    def likeness(self, seat: int) -> str:
        """Hit points of the first wave's creeps: they decide who can make the first last hit."""
        return f"wave{self._start}"

    def _playing(self) -> Lane:
        if self._lane is None:
            raise ValueError("a game must be reset before it is played")
        return self._lane

    def _to_choose(self) -> int | None:
        """The seat to be asked next; None when the game is over or the tick can go on."""
        lane = self._playing()
        if lane.over:
            return None
        return next((seat for seat in (0, 1) if not lane.sides[seat].away and seat not in self._chosen), None)

    def _turn(self) -> Turn | None:
        """Let ticks pass until somebody must choose; None when the game is over."""
        lane = self._playing()
        while (seat := self._to_choose()) is None:
            if lane.over:
                return None
            happened = lane.tick((self._chosen.get(0, "hold"), self._chosen.get(1, "hold")))
            for number, (to_own, to_other) in enumerate(happened):
                self._news[number] = f"{self._news[number]} {to_own}".strip()
                self._news[1 - number] = f"{self._news[1 - number]} {to_other}".strip()
            self._chosen = {}
        own, enemy = lane.sides[seat], lane.sides[1 - seat]
        view = View(
            ticks_left=lane.ticks_left,
            hp=own.hp,
            gold=own.gold,
            tower=own.tower,
            creep=own.creep,
            enemy_hp=enemy.hp,
            enemy_gold=enemy.gold,
            enemy_tower=enemy.tower,
            enemy_creep=enemy.creep,
            enemy_away=enemy.away,
            news=self._news[seat],
        )
        self._news[seat] = ""
        state = brief_text(view) if self._brief else state_text(view, HERO_HP, TOWER_HP)
        return Turn(seat, state, view, _DEFAULT, MOVES if self._brief else tuple(f"Action: {move}" for move in MOVES))
