from __future__ import annotations

import math

import pytest
from token_terms import Row, terms_of, update

from echo2.learning.objectives import OBJECTIVES, ObjectiveSettings

WIDE = ObjectiveSettings(clip_low=0.9, clip_high=9.0)


def log(*values: float) -> list[float]:
    return [math.log(value) for value in values]


def test_a_reply_is_compared_with_the_expectation_over_its_group() -> None:
    """q = 0.2 and 0.4: Q = (0.04 + 0.16)/0.6 = 1/3. p = 0.3 and 0.4: s = 0.9 and 1.2; loss -(0.9 - 1.2)/2 = 0.15."""
    first = Row(logp=log(0.3), prox=log(0.2), behaviour=log(0.2), advantage=1.0)
    second = Row(logp=log(0.4), advantage=-1.0)
    found = update("gepo", [first, second], WIDE)
    assert found.loss == pytest.approx(0.15)
    assert found.gradients == [[pytest.approx(-0.45)], [pytest.approx(0.6)]]
    assert found.sums["ratio"] == pytest.approx(2.1)


def test_probabilities_are_geometric_means_over_the_reply() -> None:
    """q = sqrt(0.1·0.4) = 0.2, alone in its group: Q = q, so s = sqrt(0.2·0.8)/0.2 = 2 and each token has -s/2."""
    found = update("gepo", [Row(logp=log(0.2, 0.8), prox=log(0.1, 0.4), behaviour=log(0.1, 0.4))], WIDE)
    assert found.gradients == [[pytest.approx(-1.0)] * 2]


def test_where_all_replies_of_a_group_are_equally_probable_it_is_the_policy_gradient() -> None:
    found = update("gepo", [Row(logp=log(0.3), advantage=1.0), Row(logp=log(0.3), advantage=-1.0)])
    assert found.gradients == [[pytest.approx(-0.5)], [pytest.approx(0.5)]]


def test_other_groups_do_not_matter() -> None:
    alone = update("gepo", [Row(logp=log(0.3)), Row(logp=log(0.4))], WIDE)
    beside = update("gepo", [Row(logp=log(0.3)), Row(logp=log(0.01), group=1), Row(logp=log(0.4))], WIDE)
    assert beside.gradients[0] == pytest.approx([value * 2 / 3 for value in alone.gradients[0]])


def test_it_asks_for_the_whole_updates_moments() -> None:
    with pytest.raises(ValueError, match="moments of the whole update"):
        OBJECTIVES["gepo"].sums(terms_of([Row()]), ObjectiveSettings())
