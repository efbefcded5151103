from __future__ import annotations

import math

import pytest
from token_terms import Row, update

from echo2.config.root import Config
from echo2.learning.batch import batch_rules
from echo2.learning.objectives import configured

CONFIG = Config.model_validate({"learning": {"objective": "dapo"}})


def test_the_upper_clip_is_wider_than_the_lower() -> None:
    """ρ = 1.25 still has its gradient where A > 0; 0.75 has none where A < 0. 2 tokens."""
    objective, settings = configured(CONFIG)
    up = Row(logp=[math.log(0.25)], prox=[math.log(0.2)])
    down = Row(logp=[math.log(0.15)], prox=[math.log(0.2)], behaviour=[math.log(0.2)], advantage=-1.0)
    up = Row(**(vars(up) | {"behaviour": [math.log(0.2)]}))
    found = update(objective, [up, down], settings)
    assert found.gradients == [[pytest.approx(-1.25 / 2)], [0.0]]
    too_far = Row(logp=[math.log(0.26)], prox=[math.log(0.2)], behaviour=[math.log(0.2)])
    assert update(objective, [too_far], settings).gradients == [[0.0]]


def test_groups_without_signal_and_cut_replies_carry_no_loss_by_default() -> None:
    rules = batch_rules(CONFIG.learning, 32)
    assert (rules.zero_variance, rules.overlong) == ("drop", "mask")
