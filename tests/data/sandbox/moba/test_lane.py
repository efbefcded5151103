from __future__ import annotations

from random import Random

import pytest

from echo2.data.sandbox.moba.lane import HERO_HP, KILL_GOLD, LAST_HIT_GOLD, MOVES, TOWER_GOLD, Lane, Move


def lane(**changes: int) -> Lane:
    """Both sides alike but for ``changes`` to the first."""
    made = Lane("lane", ticks=20)
    for side in made.sides:
        side.creep = 6
    for name, value in changes.items():
        setattr(made.sides[0], name, value)
    return made


def test_the_last_hit_and_only_it_pays() -> None:
    duel = lane()
    duel.sides[1].creep = 3
    duel.tick(("farm", "hold"))
    assert (duel.sides[0].gold, duel.sides[1].creep) == (0, 0)  # 3 − 2, then one by itself
    duel.sides[1].creep = 2
    duel.tick(("farm", "hold"))
    assert duel.sides[0].gold == LAST_HIT_GOLD
    duel.tick(("farm", "hold"))
    assert duel.sides[0].gold == LAST_HIT_GOLD


def test_a_fallen_hero_pays_and_comes_back_whole() -> None:
    duel = lane(hp=3)
    duel.tick(("hold", "harass"))
    assert (duel.sides[1].gold, duel.sides[0].away, duel.lead(1)) == (KILL_GOLD, 3, KILL_GOLD)
    for _ in range(3):
        duel.tick(("hold", "hold"))
    assert (duel.sides[0].away, duel.sides[0].hp) == (0, HERO_HP)


def test_who_retreats_is_not_hit() -> None:
    duel = lane(hp=3)
    duel.tick(("retreat", "harass"))
    assert (duel.sides[0].hp, duel.sides[1].hp) == (7, HERO_HP)


def test_a_fallen_tower_ends_the_game() -> None:
    duel = lane(tower=3)
    duel.tick(("hold", "siege"))
    assert duel.over
    assert duel.lead(1) == TOWER_GOLD


@pytest.mark.parametrize("seed", range(20))
def test_sides_are_treated_alike(seed: int) -> None:
    draw = Random(seed)
    one, other = Lane(f"{seed}", 30), Lane(f"{seed}", 30)
    while not one.over:
        moves: tuple[Move, Move] = (draw.choice(MOVES), draw.choice(MOVES))
        news = one.tick(moves)
        assert list(reversed(news)) == other.tick((moves[1], moves[0]))
        assert one.sides == tuple(reversed(other.sides))
        assert one.lead(0) + one.lead(1) == 0
