"""What a hero sees, and how it reads."""

from __future__ import annotations

import msgspec


class View(msgspec.Struct, frozen=True):
    ticks_left: int
    hp: int
    gold: int
    tower: int
    creep: int
    """Hit points of the seat's own front creep; not positive when it is dead."""
    enemy_hp: int
    enemy_gold: int
    enemy_tower: int
    enemy_creep: int
    enemy_away: int
    """Ticks until the enemy hero stands in the lane again; 0 while it does."""
    news: str
    """What happened since the seat's last turn."""


def state_text(view: View, full_hp: int, full_tower: int) -> str:
    enemy = f"away for {view.enemy_away} ticks" if view.enemy_away else f"{view.enemy_hp}/{full_hp} hp"
    lines = [view.news] if view.news else []
    lines += [
        f"Ticks left: {view.ticks_left}.",
        f"You: {view.hp}/{full_hp} hp, {view.gold} gold, tower {max(0, view.tower)}/{full_tower}.",
        f"Enemy: {enemy}, {view.enemy_gold} gold, tower {max(0, view.enemy_tower)}/{full_tower}.",
        f"Front creeps: enemy's {_creep(view.enemy_creep)}, yours {_creep(view.creep)}.",
        "You may: farm, harass, siege, retreat, hold.",
    ]
    return "\n".join(lines)


def brief_text(view: View) -> str:
    """One line. Example: ``5 left. You 12hp 0g 20t, foe 4hp 40g 17t, creeps 3 0``: the foe's creep comes first."""
    foe = f"away {view.enemy_away}" if view.enemy_away else f"{view.enemy_hp}hp"
    return (
        f"{view.ticks_left} left. You {view.hp}hp {view.gold}g {max(0, view.tower)}t,"
        f" foe {foe} {view.enemy_gold}g {max(0, view.enemy_tower)}t,"
        f" creeps {max(0, view.enemy_creep)} {max(0, view.creep)}"
    )


def _creep(hp: int) -> str:
    return f"{hp} hp" if hp > 0 else "dead"
