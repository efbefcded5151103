from __future__ import annotations

import math

import pytest
from token_terms import Row, update

from echo2.learning.objectives import ObjectiveSettings

SETTINGS = ObjectiveSettings(clip_low=0.2, clip_high=0.2, truncation=10.0)


def moved(before: float, after: float, advantage: float = 1.0, **fields: bool) -> Row:
    return Row(logp=[math.log(after)], behaviour=[math.log(before)], advantage=advantage, **fields)


@pytest.mark.parametrize(
    ("before", "after", "advantage", "gradient"),
    [
        (0.001, 0.005, 1.0, -5.0),  # a ratio of 5, and hardly any probability moved
        (0.001, 0.050, 1.0, -10.0),  # the weight stops at C
        (0.5, 0.75, 1.0, 0.0),  # a quarter of all probability moved: outside
        (0.5, 0.75, -1.0, 1.5),  # outside as well, but on the way back
        (0.5, 0.25, -1.0, 0.0),
        (0.5, 0.25, 1.0, -0.5),
        (0.5, 0.65, 1.0, -1.3),
    ],
)
def test_the_probability_that_moved_decides_and_not_the_ratio(
    before: float, after: float, advantage: float, gradient: float
) -> None:
    found = update("dppo_tv", [moved(before, after, advantage)], SETTINGS)
    assert found.gradients == [[pytest.approx(gradient, rel=1e-5)]]
    assert found.sums["clipped"] == (gradient == 0.0)


def test_the_anchor_is_what_the_engine_reported_even_for_the_steps_own_version() -> None:
    row = Row(logp=[math.log(0.75)], prox=[math.log(0.75)], behaviour=[math.log(0.5)], current=True)
    assert update("dppo_tv", [row], SETTINGS).gradients == [[0.0]]
