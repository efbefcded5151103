from __future__ import annotations

import math

import pytest
from token_terms import Row, update

from echo2.learning.objectives import ObjectiveSettings

SETTINGS = ObjectiveSettings(truncation=5.0)


def test_the_weight_is_not_truncated_and_a_token_that_needs_too_much_is_dropped() -> None:
    """w = e^1 = 2.72 counts in full, w = e^2 = 7.39 is above 5. Both count in the mean of two tokens."""
    found = update("decoupled_ppo", [Row(logp=[-1.0, -1.0], behaviour=[-2.0, -3.0])], SETTINGS)
    assert found.gradients == [[pytest.approx(-math.e / 2), 0.0]]
    assert found.sums["weight"] == pytest.approx(math.e)
    assert found.sums["clipped"] == 1


def test_the_ratio_is_against_the_proximal_policy_and_clipped() -> None:
    """ρ = e^0.5 = 1.65 with A > 0 is clipped; ρ = e^-0.5 is not, w = e^0.2."""
    row = Row(logp=[-1.0, -1.5], prox=[-1.5, -1.0], behaviour=[-1.5, -1.2])
    found = update("decoupled_ppo", [row], SETTINGS)
    assert found.gradients == [[0.0, pytest.approx(-math.exp(0.2 - 0.5) / 2)]]
