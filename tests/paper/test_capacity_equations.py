"""Equations of the paper with numbers worked by hand.

The recurring setting is the paper's 8B run: T_train = 1631.2 s, R = 128 prompts of 16 trajectories = 2048, S = 3,
kappa = 2, and a 16.4 GB snapshot at 100 Mbit/s, T_bcast = 1310 s; with deltas T_bcast is about 13 s.
"""

from __future__ import annotations

from typing import Any

import pytest

from echo2.provisioning.capacity import (
    bubble_ratio,
    cost_usd,
    first_usable_step,
    fresh_rollouts,
    mu_min,
    mu_min_overlapped,
    overlap_holds,
    pool_rate,
    predicted_bubble_ratio,
    staleness_bound,
    staleness_bound_tight,
    step_period_s,
)

T_TRAIN_S = 1631.2
R = 2048


def test_equation_1_holds_from_the_required_rate_upwards() -> None:
    # 2 * 1631.2 = 3262.4 against 1310 + 4096 / mu, so mu must reach 4096 / 1952.4 = 2.0979
    setting: dict[str, Any] = {"t_train_s": T_TRAIN_S, "t_bcast_s": 1310.0, "publish_period": 2, "rollouts_per_step": R}
    assert overlap_holds(**setting, mu_pool_per_s=2.098)
    assert not overlap_holds(**setting, mu_pool_per_s=2.097)


@pytest.mark.parametrize(
    ("t_train_s", "t_bcast_s", "publish_period", "expected"),
    [
        (T_TRAIN_S, 1310.0, 2, 2.10),  # 4096 / 1952.4, S = 3
        (T_TRAIN_S, 13.0, 2, 1.26),  # 4096 / 3249.4, the same with deltas
        (1649.3, 1311.0, 3, 1.69),  # 6144 / 3636.9, S = 4
        (T_TRAIN_S, 1311.0, 5, 1.50),  # 10240 / 6845.0, S = 6
        (T_TRAIN_S, 1311.0, 10, 1.37),  # 20480 / 15001.0, S = 11
    ],
)
def test_equation_2_gives_the_smallest_pool(
    t_train_s: float, t_bcast_s: float, publish_period: int, expected: float
) -> None:
    required = mu_min(t_train_s=t_train_s, t_bcast_s=t_bcast_s, publish_period=publish_period, rollouts_per_step=R)
    assert required == pytest.approx(expected, abs=0.005)


def test_equation_2_prime_charges_dissemination_only_where_staleness_runs_out() -> None:
    # S = 6, T_bcast = 0.8 T_train, T_gen = 0.3 T_train: kappa = 5 leaves 2 - 1.1 = 0.9 of a step, kappa = 2 leaves 3.9
    setting: dict[str, Any] = {
        "t_train_s": 10.0,
        "t_bcast_s": 8.0,
        "t_gen_s": 3.0,
        "staleness_budget": 6,
        "rollouts_per_step": 90,
    }
    assert mu_min_overlapped(**setting, publish_period=5) == pytest.approx(10.0)
    assert mu_min_overlapped(**setting, publish_period=2) == pytest.approx(9.0)


def test_equation_4_sums_the_workers_that_are_alive() -> None:
    assert pool_rate({"a": 0.5, "b": 1.25, "c": 4.0}, available={"a", "b", "unheard-of"}) == 1.75


def test_equation_5_counts_nothing_until_the_snapshot_has_arrived() -> None:
    setting: dict[str, Any] = {"t_train_s": T_TRAIN_S, "t_bcast_s": 2000.0, "mu_pool_per_s": 2.0}
    assert fresh_rollouts(1, **setting) == 0.0
    assert fresh_rollouts(2, **setting) == pytest.approx(2524.8)  # 2 * (3262.4 - 2000)


def test_equation_6_is_the_first_step_with_a_whole_fresh_batch() -> None:
    # (1310 + 2048 / 2.1) / 1631.2 = 2285.2 / 1631.2 = 1.40
    step = first_usable_step(t_train_s=T_TRAIN_S, t_bcast_s=1310.0, rollouts_per_step=R, mu_pool_per_s=2.1)
    assert step == 2
    assert fresh_rollouts(step, t_train_s=T_TRAIN_S, t_bcast_s=1310.0, mu_pool_per_s=2.1) >= R
    assert fresh_rollouts(step - 1, t_train_s=T_TRAIN_S, t_bcast_s=1310.0, mu_pool_per_s=2.1) < R


def test_equation_7_bounds_staleness_by_three_at_the_papers_setting() -> None:
    # 2 + 2 - 1; a pool of 0.5/s needs (1310 + 4096) / 1631.2 = 3.31, so 4 steps: 2 + 4 - 1
    setting: dict[str, Any] = {"t_train_s": T_TRAIN_S, "t_bcast_s": 1310.0, "publish_period": 2, "rollouts_per_step": R}
    assert staleness_bound(**setting, mu_pool_per_s=2.1) == 3
    assert staleness_bound(**setting, mu_pool_per_s=0.5) == 5


@pytest.mark.parametrize(
    ("publish_period", "t_bcast_s", "expected"),
    [
        (2, 1310.0, 3),  # 2 + ceil(0.5 * 0.803)
        (10, 1310.0, 11),  # 10 + ceil(0.9 * 0.803): S = kappa + 1
        (5, 4000.0, 7),  # 5 + ceil(0.8 * 2.452 = 1.96)
        (1, 1310.0, 1),  # (1 - 1/1) leaves nothing
    ],
)
def test_equation_12_tightens_the_bound_under_overlap(publish_period: int, t_bcast_s: float, expected: int) -> None:
    assert staleness_bound_tight(t_train_s=T_TRAIN_S, t_bcast_s=t_bcast_s, publish_period=publish_period) == expected


def test_the_cost_metric_is_price_times_gpu_hours() -> None:
    # 4 A100 at 5 USD/h and 10 RTX 5090 at 0.5 USD/h for one step: 25 USD/h * 1631.2 s
    machines = [(5.0, T_TRAIN_S)] * 4 + [(0.5, T_TRAIN_S)] * 10
    assert cost_usd(machines) == pytest.approx(11.3278, abs=1e-4)


def test_the_bubble_ratio_is_the_idle_share_of_the_learner() -> None:
    assert bubble_ratio(idle_s=25.0, training_s=75.0) == 0.25
    assert bubble_ratio(idle_s=0.0, training_s=0.0) == 0.0


@pytest.mark.parametrize(
    ("t_bcast_s", "t_gen_s", "staleness_budget", "publish_period", "mu_pool_per_s", "expected_s"),
    [
        # R = 90, T_train = 10 s. Nine a second fill a step in 10 s. S = 6, kappa = 5: a publish is in use 8 + 3 s
        # after it, its first batch whole after 21 s, and two steps of old trajectories last 20 s: 1 s lost in 5 steps
        (8.0, 3.0, 6, 5, 9.0, 10.2),
        (8.0, 3.0, 6, 5, 10.0, 10.0),  # what (2') asks for
        (8.0, 3.0, 6, 2, 9.0, 10.0),  # at kappa = 2 four steps of old trajectories cover it
        (8.0, 0.0, 3, 2, 6.0, 15.0),  # too few workers: 90/6 s a step, whatever the publishes do
        # S = 3, kappa = 2: 15 + 7.5 s against two steps, 2.5 s too long; the wait is paid once in two publishes,
        # because it also moves the next one back: 2.5/4 a step
        (15.0, 0.0, 3, 2, 12.0, 10.625),
        # one generation after the other: S = 0, kappa = 1 adds everything up, 10 + 8 + 3 + 10
        (8.0, 3.0, 0, 1, 9.0, 31.0),
    ],
)
def test_the_inverse_of_equation_2_prime_predicts_the_step(
    t_bcast_s: float,
    t_gen_s: float,
    staleness_budget: int,
    publish_period: int,
    mu_pool_per_s: float,
    expected_s: float,
) -> None:
    predicted = step_period_s(
        t_train_s=10.0,
        t_bcast_s=t_bcast_s,
        t_gen_s=t_gen_s,
        staleness_budget=staleness_budget,
        publish_period=publish_period,
        rollouts_per_step=90,
        mu_pool_per_s=mu_pool_per_s,
    )
    assert predicted == pytest.approx(expected_s)
    assert predicted_bubble_ratio(t_train_s=10.0, period_s=predicted) == pytest.approx(1 - 10.0 / expected_s, abs=1e-9)
