"""What is said of a simulated run, from its own lines and events."""

from __future__ import annotations

import pytest
from scenarios import line

from echo2.simulation.outcome import Spread, Staleness, outcome, spread


def test_a_run_in_numbers() -> None:
    metrics = [
        line(0, mu_pool_per_s=2.0, mu_target_per_s=None),
        line(1, mu_pool_per_s=4.0, mu_target_per_s=3.0, workers_active=4),
        line(2, mu_pool_per_s=6.0, mu_target_per_s=5.0, workers_active=4, staleness_histogram={"0": 8}),
    ]
    found = outcome(metrics, [], 40.0, 3)
    assert (found.steps, found.virtual_s, found.step_s) == (3, 40.0, 12.0)
    assert found.bubble_ratio == pytest.approx(2 / 12)
    assert found.t_train_s == Spread(10.0, 10.0, 10.0)
    assert found.staleness == Staleness(1.0, 2, {"0": 8, "1": 8, "2": 8})
    assert found.cost_usd == pytest.approx(0.3)
    assert found.cost_usd_per_step == pytest.approx(0.1)
    assert found.workers_active_mean == pytest.approx((2 + 4 + 4) / 3)
    assert (found.mu_pool_per_s, found.mu_target_per_s) == (4.0, 4.0)
    assert (found.generated, found.trained, found.buffered) == (28, 24, 4)
    assert found.stopped == ""


def test_what_did_not_happen_is_none() -> None:
    found = outcome([], [], 5.0, 3)
    nothing = (found.step_s, found.t_train_s, found.t_bcast_s, found.staleness, found.cost_usd_per_step)
    assert nothing == (None,) * 5
    assert (found.bubble_ratio_settled, found.workers_active_mean, found.mu_pool_per_s) == (None, None, None)
    assert outcome([line(0)], [], 5.0, 1).step_s is None, "one step has no time to the next"


def test_the_settled_run_is_told_without_its_warm_up() -> None:
    metrics = [line(0, idle_s=90.0), line(1, elapsed_s=110.0, idle_s=10.0), line(2, elapsed_s=120.0, idle_s=0.0)]
    found = outcome(metrics, [], 130.0, 3, warm_up_steps=1)
    assert found.bubble_ratio_settled == pytest.approx(10 / 30)
    assert found.step_s == pytest.approx(10.0)
    assert outcome(metrics, [], 130.0, 3, warm_up_steps=3).bubble_ratio_settled is None


def test_a_step_trained_again_after_a_rollback_counts_once() -> None:
    metrics = [*(line(step) for step in range(4)), line(2, policy_incarnation=1, staleness_histogram={"0": 8})]
    found = outcome(metrics, [], 90.0, 4)
    assert found.steps == 4
    assert found.staleness is not None
    assert sum(found.staleness.histogram.values()) == 4 * 8


def test_batches_beyond_the_planned_bound_are_counted() -> None:
    metrics = [line(0), line(1, staleness_bound_tight=2.0), line(2, staleness_bound_tight=1.0)]
    assert outcome(metrics, [], 90.0, 3).staleness_excess == 1


def test_events_say_what_was_sent_rented_and_lost_and_why_it_ended() -> None:
    events = [
        {"kind": "disseminated", "t_bcast_s": 4.0},
        {"kind": "disseminated", "t_bcast_s": 2.0},
        {"kind": "provisioning_activate", "machines": 3},
        {"kind": "provisioning_release"},
        {"kind": "worker_joined", "worker": "w1", "name": "cheap-1"},
        {"kind": "machine_gone", "machine": "cheap-1"},
        {"kind": "worker_silent", "worker": "w1"},
        {"kind": "stop_requested", "reason": "the budget of 1 USD is spent"},
    ]
    found = outcome([line(0)], events, 20.0, 2)
    assert found.t_bcast_s == Spread(2.0, 4.0, 4.0)
    assert (found.activations, found.releases, found.losses) == (3, 1, 1)
    assert found.stopped == "the budget of 1 USD is spent"
    assert outcome([line(0)], events, 20.0, 1).stopped == "", "it was asked for no more"


@pytest.mark.parametrize(
    ("values", "expected"),
    [([7.0], (7.0, 7.0, 7.0)), ([3.0, 1.0, 2.0], (2.0, 3.0, 3.0)), (list(range(1, 101)), (50, 90, 100))],
)
def test_a_spread_is_made_of_values_that_were_measured(values: list[float], expected: tuple[float, ...]) -> None:
    assert spread(values) == Spread(*expected)
    assert spread([]) is None
