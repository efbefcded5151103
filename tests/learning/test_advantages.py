from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.learning.advantages import Scale, normalised_advantages


def advantages(rewards: list[float], scale: Scale = "population", keys: list[object] | None = None) -> list[float]:
    found = normalised_advantages(rewards, keys or ["k"] * len(rewards), scale=scale, eps=1e-6)
    return [float(value) for value in found.values]


@pytest.mark.parametrize("reward", [1.0, 0.0, 0.35])
@pytest.mark.parametrize("scale", ["population", "sample", "none"])
def test_c01_equal_rewards_give_exactly_zero(reward: float, scale: Scale) -> None:
    assert advantages([reward] * 8, scale) == [0.0] * 8


@pytest.mark.parametrize(
    ("scale", "winner", "loser"), [("population", 1.7321, -0.5774), ("sample", 1.5, -0.5), ("none", 0.75, -0.25)]
)
def test_c01_the_standard_deviation_is_the_configured_one(scale: Scale, winner: float, loser: float) -> None:
    assert advantages([1, 0, 0, 0], scale) == pytest.approx([winner, loser, loser, loser], abs=1e-4)


@pytest.mark.parametrize("scale", ["population", "sample", "none"])
def test_c03_a_group_of_one_gives_zero(scale: Scale) -> None:
    assert advantages([0.7], scale) == [0.0]


def test_c11_interleaved_and_incomplete_groups_are_normalised_by_key() -> None:
    keys = ["A", "B", "A", "B", "B", "A", "B"]
    found = normalised_advantages([1, 0, 0, 1, 1, 0, 0], keys, scale="population", eps=1e-6)
    of_b = [float(v) for v, key in zip(found.values, keys, strict=True) if key == "B"]
    of_a = [float(v) for v, key in zip(found.values, keys, strict=True) if key == "A"]
    assert of_b == advantages([0, 1, 1, 0])
    assert of_a == advantages([1, 0, 0])


def test_keys_are_counted_by_kind() -> None:
    found = normalised_advantages([1, 1, 0, 1, 5], ["a", "a", "b", "b", "c"], scale="population", eps=1e-6)
    assert (found.keys, found.zero_variance_keys, found.single_keys) == (3, 1, 1)
    assert found.signal.tolist() == [False, False, True, True, False]


def test_no_rewards_give_no_advantages() -> None:
    assert normalised_advantages([], [], scale="population", eps=1e-6).values.shape == (0,)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e300, 1e300, allow_subnormal=True), st.integers(0, 3)), min_size=1, max_size=12),
    st.sampled_from(["population", "sample"]),
    st.randoms(use_true_random=False),
)
def test_advantages_are_finite_and_independent_of_arrival_order(
    rows: list[tuple[float, int]], scale: Scale, random: object
) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = normalised_advantages([r for r, _ in rows], [k for _, k in rows], scale=scale, eps=1e-6)
    mixed = normalised_advantages([rows[i][0] for i in order], [rows[i][1] for i in order], scale=scale, eps=1e-6)
    assert np.isfinite(straight.values).all()
    np.testing.assert_allclose(mixed.values, straight.values[order], rtol=1e-5, atol=1e-6)
