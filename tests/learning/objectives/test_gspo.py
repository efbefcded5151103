from __future__ import annotations

import math

import pytest
from token_terms import Row, update

from echo2.learning.objectives import ObjectiveSettings

WIDE = ObjectiveSettings(clip_low=0.5, clip_high=0.5)


def test_the_ratio_is_the_geometric_mean_over_a_row() -> None:
    """log-ratios 0.3 and -0.1: s = e^0.1. Each token has -A·s/2, of 1 row."""
    row = Row(logp=[-1.0, -2.0], prox=[-1.3, -1.9], behaviour=[-1.3, -1.9], advantage=2.0)
    found = update("gspo", [row], WIDE)
    assert found.loss == pytest.approx(-2.0 * math.exp(0.1))
    assert found.gradients == [[pytest.approx(-math.exp(0.1))] * 2]
    assert found.sums["ratio"] == pytest.approx(2 * math.exp(0.1))


def test_a_row_is_clipped_as_a_whole_and_rows_weigh_alike() -> None:
    """s = e^0.001 is beyond 1 + 4e-4; the other row is on policy: 1/2 of its mean, -0.5/3 for each of three tokens."""
    far = Row(logp=[-1.0, -2.0], behaviour=[-1.002, -2.0])
    near = Row(logp=[-1.0, -1.0, -1.0])
    found = update("gspo", [far, near], ObjectiveSettings(clip_low=3e-4, clip_high=4e-4))
    assert found.gradients[0] == [0.0, 0.0]
    assert found.gradients[1] == pytest.approx([-0.5 / 3] * 3)
    assert found.sums["clipped"] == 2
    assert found.loss == pytest.approx(-(1.0004 + 1.0) / 2, abs=1e-6)


def test_masked_tokens_are_not_part_of_the_mean() -> None:
    row = Row(logp=[-1.0, -9.0, -2.0], behaviour=[-1.2, -1.0, -2.0], mask=[True, False, True])
    found = update("gspo", [row], WIDE)
    assert found.gradients == [[pytest.approx(-math.exp(0.1) / 2), 0.0, pytest.approx(-math.exp(0.1) / 2)]]


def test_fresh_rows_are_compared_with_the_learners_own_numerics() -> None:
    """What the engine reports differs by rounding, more than the clip range is wide."""
    row = Row(logp=[-1.0], behaviour=[-1.01], current=True)
    assert update("gspo", [row], ObjectiveSettings(clip_low=3e-4, clip_high=4e-4)).gradients == [[pytest.approx(-1.0)]]
