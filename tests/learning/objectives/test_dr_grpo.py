from __future__ import annotations

import pytest
from token_terms import Row, update

from echo2.learning.advantages import normalised_advantages
from echo2.learning.objectives import ObjectiveSettings


def test_a_token_weighs_the_same_in_a_long_and_a_short_reply_and_in_every_update() -> None:
    """2 rows, L = 8: every token has -A/16, whatever else the update holds."""
    given = ObjectiveSettings(longest_reply=8)
    short, long = Row(logp=[-1.0], advantage=0.75), Row(logp=[-1.0] * 4, advantage=-0.25)
    found = update("dr_grpo", [short, long], given)
    assert found.gradients[0] == pytest.approx([-0.75 / 16])
    assert found.gradients[1] == pytest.approx([0.25 / 16] * 4)
    beside_longer = update("dr_grpo", [short, Row(logp=[-1.0] * 7, advantage=-0.25)], given)
    assert beside_longer.gradients[0] == found.gradients[0]


def test_its_advantages_are_not_divided() -> None:
    made = normalised_advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, scale="none", eps=1e-6)
    assert made.values.tolist() == [0.75, -0.25, -0.25, -0.25]
