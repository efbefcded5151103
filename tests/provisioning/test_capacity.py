from __future__ import annotations

import math
from collections import deque
from itertools import count
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.provisioning.capacity import (
    Infeasible,
    first_usable_step,
    fresh_rollouts,
    mu_min,
    mu_min_overlapped,
    overlap_holds,
    staleness_bound,
    staleness_bound_tight,
    step_period_s,
)

seconds = st.floats(min_value=0.01, max_value=1e5)
waits = st.floats(min_value=0.0, max_value=1e5)


@pytest.mark.parametrize("t_bcast_s", [200.0, 201.0])
def test_a_dissemination_that_fills_the_period_is_refused_with_numbers(t_bcast_s: float) -> None:
    """Field report F04 (b)."""
    with pytest.raises(Infeasible) as caught:
        mu_min(t_train_s=100.0, t_bcast_s=t_bcast_s, publish_period=2, rollouts_per_step=128)
    sentence = str(caught.value)
    assert f"got 2 * 100 s = 200 s against {t_bcast_s:g} s" in sentence
    assert "publish every 3 steps or more (staleness budget 4 or more)" in sentence


def test_the_nearest_way_out_of_an_infeasible_period_is_feasible() -> None:
    assert mu_min(t_train_s=100.0, t_bcast_s=201.0, publish_period=3, rollouts_per_step=128) > 0


def test_the_boundary_rate_is_just_enough() -> None:
    """Field report F04 (c)."""
    setting: dict[str, Any] = {"t_train_s": 100.0, "t_bcast_s": 100.0, "publish_period": 2, "rollouts_per_step": 128}
    assert mu_min(**setting) == pytest.approx(2.56)
    assert not overlap_holds(**setting, mu_pool_per_s=2.55)
    assert overlap_holds(**setting, mu_pool_per_s=2.56)


def test_an_impossible_period_never_overlaps_whatever_the_pool() -> None:
    assert not overlap_holds(
        t_train_s=100.0, t_bcast_s=200.0, publish_period=2, rollouts_per_step=1, mu_pool_per_s=1e12
    )


def test_too_little_staleness_is_refused_with_the_budget_that_would_do() -> None:
    setting: dict[str, Any] = {
        "t_train_s": 100.0,
        "t_bcast_s": 180.0,
        "t_gen_s": 30.0,
        "publish_period": 2,
        "rollouts_per_step": 128,
    }
    with pytest.raises(
        Infeasible, match=r"\(3 - 2 \+ 1\) \* 100 s = 200 s against 180 s \+ 30 s = 210 s: raise .* 4 or"
    ):
        mu_min_overlapped(**setting, staleness_budget=3)
    assert mu_min_overlapped(**setting, staleness_budget=4) == pytest.approx(1.42, abs=0.01)


def test_an_empty_pool_has_no_first_usable_step() -> None:
    with pytest.raises(Infeasible, match="more than 0 trajectories/s, got 0"):
        first_usable_step(t_train_s=1.0, t_bcast_s=0.0, rollouts_per_step=8, mu_pool_per_s=0.0)


@pytest.mark.parametrize(
    ("t_train_s", "t_bcast_s", "publish_period"), [(0.0, 1.0, 2), (1.0, -1.0, 2), (1.0, math.inf, 2), (1.0, 1.0, 0)]
)
def test_impossible_measurements_are_refused(t_train_s: float, t_bcast_s: float, publish_period: int) -> None:
    with pytest.raises(UserError):
        mu_min(t_train_s=t_train_s, t_bcast_s=t_bcast_s, publish_period=publish_period, rollouts_per_step=1)


def test_a_whole_number_of_steps_is_not_rounded_up_by_float_noise() -> None:
    # (0.1 + 1/5) / 0.1 is 3.0000000000000004 in doubles
    assert first_usable_step(t_train_s=0.1, t_bcast_s=0.1, rollouts_per_step=1, mu_pool_per_s=5.0) == 3


@settings(max_examples=60, deadline=None)
@given(seconds, waits, st.integers(1, 12), st.integers(1, 4096))
def test_the_required_rate_is_positive_and_satisfies_the_overlap_exactly(
    t_train_s: float, t_bcast_s: float, publish_period: int, rollouts_per_step: int
) -> None:
    assume(publish_period * t_train_s > t_bcast_s * 1.001)
    timing: dict[str, Any] = {"t_train_s": t_train_s, "t_bcast_s": t_bcast_s, "publish_period": publish_period}
    required = mu_min(**timing, rollouts_per_step=rollouts_per_step)
    assert 0 < required < math.inf
    for rate, holds in ((required, True), (required * 0.999, False)):
        assert overlap_holds(**timing, rollouts_per_step=rollouts_per_step, mu_pool_per_s=rate) is holds


@settings(max_examples=60, deadline=None)
@given(seconds, waits, st.integers(1, 12), st.integers(1, 4096), st.floats(1.0, 10.0))
def test_under_overlap_the_tight_bound_is_never_below_the_conservative_one(
    t_train_s: float, t_bcast_s: float, publish_period: int, rollouts_per_step: int, surplus: float
) -> None:
    assume(publish_period * t_train_s > t_bcast_s * 1.001)
    timing: dict[str, Any] = {"t_train_s": t_train_s, "t_bcast_s": t_bcast_s, "publish_period": publish_period}
    pool = surplus * mu_min(**timing, rollouts_per_step=rollouts_per_step)
    conservative = staleness_bound(**timing, rollouts_per_step=rollouts_per_step, mu_pool_per_s=pool)
    assert conservative <= staleness_bound_tight(**timing)


@settings(max_examples=60, deadline=None)
@given(seconds, waits, st.integers(1, 4096), st.floats(1e-3, 1e4))
def test_the_first_usable_step_is_the_first_with_enough_fresh_trajectories(
    t_train_s: float, t_bcast_s: float, rollouts_per_step: int, mu_pool_per_s: float
) -> None:
    timing: dict[str, Any] = {"t_train_s": t_train_s, "t_bcast_s": t_bcast_s, "mu_pool_per_s": mu_pool_per_s}
    first = first_usable_step(**timing, rollouts_per_step=rollouts_per_step)
    assert fresh_rollouts(first, **timing) >= rollouts_per_step * (1 - 1e-6)
    assert fresh_rollouts(first - 1, **timing) < rollouts_per_step * (1 + 1e-6)


def played_step_s(
    *,
    t_train_s: float,
    t_bcast_s: float,
    t_gen_s: float,
    staleness_budget: int,
    publish_period: int,
    rollouts_per_step: int,
    mu_pool_per_s: float,
    steps: int = 240,
) -> float:
    """The mean step of the second half of a run that is played trajectory by trajectory.

    One trajectory is finished every 1/mu seconds, under the version that was installed T_gen earlier; the learner takes
    the oldest that are admissible as soon as it is idle and there are R of them.
    """
    installed: deque[tuple[int, float]] = deque([(0, -math.inf)])
    waiting: deque[int] = deque()
    begun: list[float] = []
    idle_from_s = 0.0

    def train(now_s: float) -> bool:
        nonlocal idle_from_s
        step = len(begun)
        while waiting and waiting[0] < step - staleness_budget:
            waiting.popleft()
        if idle_from_s > now_s or len(waiting) < rollouts_per_step:
            return False
        for _ in range(rollouts_per_step):
            waiting.popleft()
        begun.append(idle_from_s if ready_s <= idle_from_s else now_s)
        idle_from_s = begun[-1] + t_train_s
        if (step + 1) % publish_period == 0:
            installed.append((step + 1, idle_from_s + t_bcast_s))
        return True

    ready_s = 0.0
    for number in count(1):
        now_s = number / mu_pool_per_s
        while train(now_s):  # it may have become idle since the last trajectory, with enough of them there
            pass
        while len(installed) > 1 and installed[1][1] <= now_s - t_gen_s:
            installed.popleft()
        waiting.append(installed[0][0])
        ready_s = now_s
        train(now_s)
        if len(begun) > steps:
            break
    return (begun[steps] - begun[steps // 2]) / (steps - steps // 2)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.0, 3.0), st.floats(0.0, 1.5), st.integers(1, 9), st.integers(0, 10), st.floats(0.3, 3.0), st.booleans()
)
def test_the_predicted_step_is_that_of_a_run_played_trajectory_by_trajectory(
    t_bcast: float, t_gen: float, publish_period: int, more: int, speed: float, at_the_edge: bool
) -> None:
    """Validates (2') and its inverse, below and above the required rate, in every regime of S and kappa."""
    setting: dict[str, Any] = {
        "t_train_s": 1.0,
        "t_bcast_s": min(t_bcast, 0.99 * publish_period),
        "t_gen_s": t_gen,
        "staleness_budget": publish_period - 1 + more,
        "publish_period": publish_period,
        "rollouts_per_step": 100,
    }
    rate = 100.0 * speed
    if at_the_edge:
        try:
            rate = min(1000.0, mu_min_overlapped(**setting))
        except Infeasible:
            rate = 100.0
    predicted = step_period_s(**setting, mu_pool_per_s=rate)
    assert played_step_s(**setting, mu_pool_per_s=rate) == pytest.approx(predicted, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(seconds, waits, waits, st.integers(2, 12), st.integers(1, 12), st.integers(1, 4096))
def test_the_rate_of_2_prime_is_the_smallest_that_keeps_steps_at_their_length(
    t_train_s: float, t_bcast_s: float, t_gen_s: float, publish_period: int, more: int, rollouts_per_step: int
) -> None:
    setting: dict[str, Any] = {
        "t_train_s": t_train_s,
        "t_bcast_s": t_bcast_s,
        "t_gen_s": t_gen_s,
        "staleness_budget": publish_period + more,
        "publish_period": publish_period,
        "rollouts_per_step": rollouts_per_step,
    }
    assume((more + 1) * t_train_s > (t_bcast_s + t_gen_s) * 1.001)
    required = mu_min_overlapped(**setting)
    assert step_period_s(**setting, mu_pool_per_s=required) == pytest.approx(t_train_s, rel=1e-9)
    assert step_period_s(**setting, mu_pool_per_s=2 * required) == pytest.approx(t_train_s, rel=1e-9)
    assert step_period_s(**setting, mu_pool_per_s=0.9 * required) > t_train_s * (1 + 1e-9)


def test_a_learner_that_would_wait_for_ever_has_no_step() -> None:
    setting: dict[str, Any] = {"t_train_s": 1.0, "t_bcast_s": 1.0, "t_gen_s": 0.0, "rollouts_per_step": 8}
    with pytest.raises(Infeasible, match=r"kappa must be at most S \+ 1, got kappa = 5 with S = 3: publish every 4"):
        step_period_s(**setting, staleness_budget=3, publish_period=5, mu_pool_per_s=1.0)
    with pytest.raises(Infeasible, match="more than 0 trajectories/s, got 0: add a worker"):
        step_period_s(**setting, staleness_budget=3, publish_period=2, mu_pool_per_s=0.0)


def test_the_planned_staleness_has_room_for_groups_that_take_several_steps() -> None:
    timing: dict[str, Any] = {"t_train_s": 100.0, "t_bcast_s": 80.0, "publish_period": 2}
    assert staleness_bound_tight(**timing) == 2 + math.ceil(0.4)
    assert staleness_bound_tight(**timing, t_gen_s=700.0) == 2 + math.ceil(0.4 + 7.0)
