"""Modelled engines: lengths with tails, and groups as slow as their slowest reply."""

from __future__ import annotations

import statistics
from random import Random

import pytest

from echo2.simulation.engines import EngineModel, LengthModel, longest, with_stragglers

LIMIT = 1_000_000


@pytest.mark.parametrize("model", [LengthModel(400, "lognormal", 0.6), LengthModel(400, "pareto", 0.5)])
def test_half_of_the_lengths_lie_beyond_the_median(model: LengthModel) -> None:
    random = Random(1)
    assert statistics.median(model.draw(random, LIMIT) for _ in range(4000)) == pytest.approx(400, rel=0.06)


def test_a_pareto_tail_is_heavier_and_all_are_cut_at_the_limit() -> None:
    random = Random(2)
    pareto = [LengthModel(400, "pareto", 0.6).draw(random, LIMIT) for _ in range(4000)]
    lognormal = [LengthModel(400, "lognormal", 0.6).draw(random, LIMIT) for _ in range(4000)]
    assert max(pareto) > 3 * max(lognormal)
    cut = [LengthModel(400, "pareto", 0.6).draw(random, 300) for _ in range(100)]
    assert max(cut) == 300
    assert cut.count(300) > 50


def test_a_group_takes_as_long_as_its_slowest_reply() -> None:
    model = EngineModel(tokens_per_s=10.0, places=8, prefill_s=1.0)
    lengths = [model.lengths.draw(Random(7), LIMIT)]
    assert model.group_s(Random(7), 1, LIMIT) == pytest.approx(1.0 + lengths[0] / 10.0)
    assert model.group_s(Random(7), 8, LIMIT) > model.group_s(Random(7), 1, LIMIT)


def test_replies_that_find_no_place_wait_for_one() -> None:
    assert longest([5, 3, 2], 3) == 5
    assert longest([5, 3, 2], 2) == 5
    assert longest([5, 3, 4], 2) == 7
    assert longest([1, 1, 1, 1], 1) == 4
    assert longest([], 1) == 0


def test_lanes_share_the_places() -> None:
    model = EngineModel(lengths=LengthModel(spread=0.0), places=8)
    alone = model.group_s(Random(0), 8, LIMIT)
    assert model.group_s(Random(0), 8, LIMIT, lanes=2) == pytest.approx(2 * alone)


def test_stragglers_are_a_share_of_the_fleet_chosen_by_the_seed() -> None:
    models = [EngineModel()] * 20
    slow = with_stragglers(models, 0.1, 4.0, Random(3))
    assert sorted(model.slowness for model in slow) == [1.0] * 18 + [4.0] * 2
    assert slow == with_stragglers(models, 0.1, 4.0, Random(3))
