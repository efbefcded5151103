"""A simulated run is measured and played again: what comes back must be what was put in."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.simulation.compared import Bounds, Figures, compare, figures, total_variation
from echo2.simulation.measured import nearest, pace, scenario_of, speeds
from echo2.simulation.play import play
from echo2.simulation.scenario import build_scenario

STEPS, WARM_UP = 60, 10
RUN: dict[str, Any] = {
    "run": {"steps": STEPS},
    "rollout": {"rollouts_per_step": 32, "group_size": 8},
    "staleness": {"budget": 5, "publish_period": 2},
    "rehearsal": {"train_s": 2.0, "train_spread": 0.1, "group_s": 2.2, "snapshot_bytes": 50_000_000},
}
WORLD = {"checkpoint_s": 0.5, "snapshot_s": 0.8, "learner_latency_s": 0.01, "uplink_mbps": 1e5}
WORKERS = [{"name": "w", "count": 3, "decode_s": 1.0, "activation_s": 0.3, "latency_s": 0.02, "jitter": 0.0,
            "down_mbps": 1e5}]  # fmt: skip
BOUNDS = Bounds(bubble_ratio=0.02, steps_per_min=0.03, staleness=0.06)

Events = list[dict[str, Any]]


@cache
def seen() -> tuple[Any, Events]:
    """What a real run of this scenario would have left: its metrics lines and its coordinator's events."""
    run = play(build_scenario({**RUN, "world": WORLD, "workers": WORKERS})).run
    return run.metrics, [{**event, "wall_time": event["at_s"]} for event in run.events if event["who"] == "coordinator"]


def test_the_speeds_of_a_run_are_read_back_from_what_its_coordinator_wrote_down() -> None:
    found = speeds(*seen(), WARM_UP)
    assert found.train.median_s == pytest.approx(2.0, rel=0.03)
    assert found.train.spread == pytest.approx(0.1, rel=0.3)
    assert list(found.groups) == ["w-1", "w-2", "w-3"]
    for worker in found.groups.values():
        assert worker.median_s == pytest.approx(2.2, rel=0.08)
        assert worker.spread == pytest.approx(0.2, rel=0.25)
    assert found.worker_latency_s == pytest.approx(0.02, rel=0.1)
    assert found.learner_latency_s == pytest.approx(0.01, rel=0.3)
    assert found.checkpoint_s == pytest.approx(0.5, abs=0.02)
    assert found.snapshot_s == pytest.approx(0.8, abs=0.02)
    assert found.decode_s == pytest.approx(1.0, abs=0.1)
    assert found.activation_s == pytest.approx(0.3, abs=0.03)
    assert (found.snapshot_bytes, found.delta_share) == (50_000_120, pytest.approx(0.01, rel=0.01))


def test_a_run_played_again_at_its_measured_speeds_is_within_the_bounds_of_what_it_was() -> None:
    lines, events = seen()
    tables = scenario_of(RUN, speeds(lines, events, WARM_UP), seed=7, warm_up_steps=WARM_UP)
    again = play(build_scenario(tables)).run.metrics
    result = compare(figures([lines], WARM_UP), figures([again], WARM_UP), BOUNDS)
    assert result.missed == (), result.off
    assert result.real.bubble_ratio > 0.2, "the learner waited, else there was little to compare"


def test_a_prediction_that_misses_says_what() -> None:
    real = Figures(180, 0.30, 50.0, {"2": 0.5, "3": 0.5})
    result = compare(real, Figures(540, 0.36, 54.0, {"1": 0.2, "2": 0.3, "3": 0.5}), Bounds())
    assert result.missed == ("bubble_ratio", "staleness")
    assert msgspec.structs.astuple(result.off) == pytest.approx((0.06, 0.08, 0.2))


def test_a_run_that_was_too_short_to_tell_is_refused() -> None:
    lines, events = seen()
    with pytest.raises(ValueError, match="at least two steps after the first 59, got 60"):
        speeds(lines, events, STEPS - 1)
    with pytest.raises(ValueError, match="at least two steps"):
        figures([lines, lines[:5]], 4)


def test_all_runs_of_one_thing_count_together() -> None:
    lines, _ = seen()
    once, twice = figures([lines], WARM_UP), figures([lines, lines], WARM_UP)
    assert twice.steps == 2 * once.steps
    assert (twice.bubble_ratio, twice.steps_per_min) == pytest.approx((once.bubble_ratio, once.steps_per_min))
    assert twice.staleness == pytest.approx(once.staleness)


def test_the_nearest_value_lies_where_most_brackets_agree() -> None:
    assert nearest([]) == 0.0
    assert nearest([(1.0, 1.0), (0.0, 5.0), (0.9, 1.1)]) == pytest.approx(1.0)
    assert nearest([(0.0, 2.0), (1.0, 3.0)]) == pytest.approx(1.5)


def test_a_pace_of_nothing_takes_no_time() -> None:
    assert pace([0.0, 0.0]).count == 0
    assert pace([2.0, 8.0]).median_s == pytest.approx(4.0)


shares = st.dictionaries(st.sampled_from("01234"), st.floats(0.01, 1.0), min_size=1).map(
    lambda weights: {age: weight / sum(weights.values()) for age, weight in weights.items()}
)


@given(shares, shares, shares)
def test_total_variation_is_a_distance_between_0_and_1(
    one: dict[str, float], other: dict[str, float], third: dict[str, float]
) -> None:
    assert total_variation(one, one) == 0.0
    assert total_variation(one, other) == total_variation(other, one)
    assert 0.0 <= total_variation(one, other) <= 1.0 + 1e-9
    assert total_variation(one, third) <= total_variation(one, other) + total_variation(other, third) + 1e-9


def test_histograms_without_a_common_value_are_1_apart() -> None:
    assert total_variation({"1": 1.0}, {"2": 0.5, "3": 0.5}) == pytest.approx(1.0)
