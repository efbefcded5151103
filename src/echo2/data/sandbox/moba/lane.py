"""The rules of a lane duel: two heroes, two waves of creeps, two towers.

Invariant: pure and symmetric. Both heroes choose before either moves; what a tick does to one side it would do to the
other with the sides exchanged. The gain is gold, each side's less the other's, so gains sum to zero.
"""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

Move = Literal["hold", "farm", "harass", "siege", "retreat"]
MOVES: tuple[Move, ...] = ("hold", "farm", "harass", "siege", "retreat")

HERO_HP, TOWER_HP = 12, 20
CREEP_HP = (4, 7)
"""A creep is born with so many hit points; both sides' creeps of one wave with the same."""
FARM_DAMAGE, HARASS_DAMAGE, SIEGE_DAMAGE = 2, 3, 3
CREEP_DAMAGE, TOWER_DAMAGE = 1, 2
HEAL = 4
LAST_HIT_GOLD, KILL_GOLD, TOWER_GOLD = 40, 120, 200
RESPAWN_TICKS = 3


class Side(msgspec.Struct):
    """One hero with its creep and its tower."""

    creep: int
    """Hit points of the front creep, which the other hero wants to hit last."""
    hp: int = HERO_HP
    gold: int = 0
    tower: int = TOWER_HP
    away: int = 0
    """Ticks until the hero stands in the lane again; 0 while it does."""


class Lane:
    def __init__(self, seed: str, ticks: int) -> None:
        self._draw = Random(seed)
        self.ticks_left = ticks
        born = self._draw.randint(*CREEP_HP)
        self.sides = (Side(born), Side(born))

    @property
    def over(self) -> bool:
        return self.ticks_left <= 0 or any(side.tower <= 0 for side in self.sides)

    def lead(self, side: int) -> int:
        """Gold of a side less the other's."""
        return self.sides[side].gold - self.sides[1 - side].gold

    def tick(self, moves: tuple[Move, Move]) -> list[tuple[str, str]]:
        """Both sides' moves at once (an absent hero's is ``hold``); what happened, as (to own side, to the other)."""
        heroes_before = [side.away == 0 for side in self.sides]
        news: list[tuple[str, str]] = [("", ""), ("", "")]
        for number, move in enumerate(moves):
            if heroes_before[number]:
                news[number] = self._act(number, move, moves[1 - number], heroes_before[1 - number])
        self._creeps_fight()
        for number, side in enumerate(self.sides):
            if side.away:
                side.away -= 1
                side.hp = HERO_HP if not side.away else side.hp
            elif side.hp <= 0:
                side.away, side.hp = RESPAWN_TICKS, 0
                self.sides[1 - number].gold += KILL_GOLD
                own, other = news[number]
                news[number] = (f"{own} You fell.".strip(), f"{other} The enemy fell: {KILL_GOLD} gold.".strip())
        self.ticks_left -= 1
        return news

    def _act(self, number: int, move: Move, theirs: Move, enemy_there: bool) -> tuple[str, str]:
        own, enemy = self.sides[number], self.sides[1 - number]
        if move == "farm":
            if enemy.creep <= 0:
                return "You found no creep to hit.", "The enemy looked for creeps."
            enemy.creep -= FARM_DAMAGE
            if enemy.creep <= 0:
                own.gold += LAST_HIT_GOLD
                return f"You made the last hit: {LAST_HIT_GOLD} gold.", "The enemy made a last hit."
            return "You wounded a creep.", "The enemy hit a creep."
        if move == "harass":
            if not enemy_there or theirs == "retreat":
                return "You found nobody to hit.", "The enemy looked for you."
            enemy.hp -= HARASS_DAMAGE
            own.hp -= CREEP_DAMAGE
            return f"You hit the enemy for {HARASS_DAMAGE}.", f"The enemy hit you for {HARASS_DAMAGE}."
        if move == "siege":
            enemy.tower -= SIEGE_DAMAGE
            own.hp -= TOWER_DAMAGE
            if enemy.tower <= 0:
                own.gold += TOWER_GOLD
            return f"You hit the tower for {SIEGE_DAMAGE}.", f"The enemy hit your tower for {SIEGE_DAMAGE}."
        if move == "retreat":
            own.hp = min(HERO_HP, own.hp + HEAL)
            return "You recovered at your tower.", "The enemy went back to its tower."
        return "You waited.", "The enemy waited."

    def _creeps_fight(self) -> None:
        for side in self.sides:
            side.creep -= CREEP_DAMAGE if side.creep > 0 else 0
        if all(side.creep <= 0 for side in self.sides):
            born = self._draw.randint(*CREEP_HP)
            for side in self.sides:
                side.creep = born
