from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_terms import Row, terms_of, update

from echo2.learning.objectives import ObjectiveSettings
from echo2.learning.objectives.m2po import BINS, moments


def stale(*log_ratios: float, **fields: object) -> Row:
    """prox stands at -1 and so does θ; the sampling version where the log-ratios say."""
    row = {"logp": [-1.0] * len(log_ratios), "behaviour": [-1.0 - value for value in log_ratios]}
    return Row(**(row | fields))  # type: ignore[arg-type]


def test_the_largest_log_ratios_are_masked_until_the_mean_square_is_small_enough() -> None:
    """Squares 0.01, 0.04, 0.09, 1: means from below 0.01, 0.025, 0.0467, 0.285. τ = 0.04 keeps two, 0.05 three."""
    row = stale(0.1, -0.2, 0.3, 1.0)
    kept = [-math.exp(0.1) / 4, -math.exp(-0.2) / 4, -math.exp(0.3) / 4, -math.exp(1.0) / 4]
    two = update("m2po", [row], ObjectiveSettings(second_moment=0.04))
    assert two.gradients == [pytest.approx([*kept[:2], 0.0, 0.0])]
    assert two.sums["clipped"] == 2
    assert update("m2po", [row], ObjectiveSettings(second_moment=0.05)).gradients == [pytest.approx([*kept[:3], 0.0])]
    assert update("m2po", [row], ObjectiveSettings(second_moment=0.3)).gradients == [pytest.approx(kept)]


def test_the_mean_is_of_the_whole_update() -> None:
    """A square of 0.09 alone is masked; beside three tokens that did not move the mean is 0.0225."""
    settings = ObjectiveSettings(second_moment=0.04)
    assert update("m2po", [stale(0.3)], settings).gradients == [[0.0]]
    beside = update("m2po", [stale(0.3), stale(0.0, 0.0, 0.0)], settings, parts=[[0], [1]])
    assert beside.gradients[0] == pytest.approx([-math.exp(0.3) / 4])


def test_fresh_tokens_and_those_without_a_log_prob_are_never_masked() -> None:
    settings = ObjectiveSettings(second_moment=1e-6)
    for row in (stale(3.0, current=True), stale(3.0, known=False)):
        assert update("m2po", [row], settings).gradients == [[pytest.approx(-1.0)]]


def test_tokens_without_a_log_prob_do_not_thin_the_mean() -> None:
    settings = ObjectiveSettings(second_moment=0.04)
    beside = update("m2po", [stale(0.3), stale(0.0, 0.0, 0.0, known=False)], settings)
    assert beside.gradients[0] == [0.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=12), st.floats(1e-3, 2.0))
def test_what_is_kept_obeys_the_bound_and_one_bin_more_would_not(log_ratios: list[float], largest: float) -> None:
    row = stale(*log_ratios)
    found = update("m2po", [row], ObjectiveSettings(second_moment=largest))
    squares = ((terms_of([row]).logp_prox - terms_of([row]).logp_behaviour).double() ** 2).tolist()
    kept = [m for m, gradient in zip(squares, found.gradients[0], strict=True) if gradient != 0.0]
    masked = [m for m, gradient in zip(squares, found.gradients[0], strict=True) if gradient == 0.0]
    if kept:
        assert sum(kept) / len(kept) <= largest * (1 + 1e-9)
    if masked:
        nearest = [m for m in masked if m <= min(masked) * 2 ** (1.01 / 50)]
        assert min(masked) >= max(kept, default=0.0)
        assert sum(kept + nearest) > largest * len(kept + nearest) * (1 - 1e-9)


def test_the_statistics_are_sums_that_can_be_added() -> None:
    one, other = terms_of([stale(0.1, 0.5)]), terms_of([stale(-2.0)])
    both = terms_of([stale(0.1, 0.5), stale(-2.0)])
    added = moments(one, ObjectiveSettings()) + moments(other, ObjectiveSettings())
    assert torch.equal(added, moments(both, ObjectiveSettings()))
    assert float(added[:BINS].sum()) == 3
    assert float(added[BINS:].sum()) == pytest.approx(0.01 + 0.25 + 4.0)
