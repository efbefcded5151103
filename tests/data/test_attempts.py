from __future__ import annotations

from itertools import combinations

import pytest

from echo2.data.attempts import interval, measures, pass_at


@pytest.mark.parametrize(("replies", "passed"), [(1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (7, 1)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_pass(replies: int, passed: int) -> None:
    outcomes = [1] * passed + [0] * (replies - passed)
    for k in range(1, replies + 1):
        chosen = list(combinations(outcomes, k))
        assert pass_at(replies, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_fewer_than_k_replies_give_no_estimate() -> None:
    with pytest.raises(ValueError, match="at least k replies"):
        pass_at(3, 1, 4)
    found = measures({"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0]}, 1.0, 4)
    assert found["pass@4"] == {"value": 1.0, "ci95": None, "prompts": 1}
    assert found["pass@2"]["prompts"] == 2


def test_averages_and_passes_are_means_over_prompts() -> None:
    found = measures({"a": [1.0, 0.0], "b": [0.5, 0.0], "c": [1.0, 1.0]}, 1.0, 2)
    assert list(found) == ["avg@2", "pass@1", "pass@2"]
    assert found["avg@2"]["value"] == found["pass@1"]["value"] == 0.5
    assert found["pass@2"]["value"] == pytest.approx(2 / 3)
    assert found["avg@2"]["ci95"] == interval([0.5, 0.0, 1.0])
    assert measures({}, 1.0, 1)["avg@1"] == {"value": None, "ci95": None, "prompts": 0}


def test_the_steps_of_k_end_with_the_number_of_samples() -> None:
    assert list(measures({"a": [1.0] * 6}, 1.0, 6)) == ["avg@6", "pass@1", "pass@2", "pass@4", "pass@6"]
