from __future__ import annotations

import math

import pytest
from token_terms import Row, update

from echo2.learning.objectives import ObjectiveSettings


def test_a_weight_is_clipped_and_its_token_keeps_its_gradient() -> None:
    """r = e^2 is clipped to 4, r = e^-2 is as it is: -r·A/2 for each of two tokens, also where GRPO has none."""
    row = Row(logp=[-1.0, -3.0], prox=[-3.0, -1.0], behaviour=[-3.0, -1.0], advantage=0.5)
    found = update("cispo", [row], ObjectiveSettings(clip_high=3.0))
    assert found.gradients == [[pytest.approx(-1.0), pytest.approx(-0.25 * math.exp(-2))]]
    assert found.sums["clipped"] == 1
    assert found.loss == pytest.approx(-(4 * 0.5 * -1.0 + math.exp(-2) * 0.5 * -3.0) / 2)


def test_where_the_engine_reported_nothing_the_weight_is_the_change_within_the_step() -> None:
    row = Row(logp=[-1.0], prox=[-1.5], behaviour=[-40.0], known=False)
    assert update("cispo", [row], ObjectiveSettings(clip_high=3.0)).gradients == [[pytest.approx(-math.exp(0.5))]]
