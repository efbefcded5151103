"""Three heroes by rule: one fights, one besieges, one counts creeps.

Invariant: a bot is a function of what its seat sees and of seeded random numbers.
"""

from __future__ import annotations

from random import Random

from echo2.data.sandbox.moba.lane import FARM_DAMAGE, HARASS_DAMAGE, SIEGE_DAMAGE, TOWER_DAMAGE
from echo2.data.sandbox.moba.view import View

WOUNDED = 4
"""Hit points at which a careful hero goes home."""


def brawler(view: View, draw: Random, /) -> str:
    """Hits whoever is there, and seldom goes home in time."""
    if view.enemy_away:
        return "Action: farm"
    return "Action: retreat" if view.hp <= 2 and draw.random() < 0.5 else "Action: harass"


def besieger(view: View, draw: Random, /) -> str:
    """Hits the tower as long as it can stand there."""
    return "Action: retreat" if view.hp <= TOWER_DAMAGE else "Action: siege"


def farmer(view: View, draw: Random, /) -> str:
    """Makes last hits, finishes the wounded, goes home when it must."""
    if view.enemy_tower <= SIEGE_DAMAGE and view.hp > TOWER_DAMAGE:
        return "Action: siege"
    if 0 < view.enemy_creep <= FARM_DAMAGE:
        return "Action: farm"
    if not view.enemy_away and view.enemy_hp <= HARASS_DAMAGE:
        return "Action: harass"
    if view.hp <= WOUNDED:
        return "Action: retreat"
    return "Action: harass" if not view.enemy_away else "Action: siege"


BOTS = {"brawler": brawler, "besieger": besieger, "farmer": farmer}
