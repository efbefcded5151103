from __future__ import annotations

from typing import Any

import msgspec
import pytest

from echo2.metrics import StepMetrics
from echo2.provisioning.measured import Measured, measured


def line(step: int, **changes: Any) -> StepMetrics:
    """A line of metrics with what matters here."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(StepMetrics):
        if field.required:
            fields[field.name] = {} if "dict" in str(field.type) else 0
    return msgspec.convert(
        fields | {"step": step, "t_train_s": 10.0, "mu_pool_per_s": 6.0, "workers_active": 3} | changes, StepMetrics
    )


def test_the_step_is_the_median_of_the_last_five() -> None:
    lines = [line(k, t_train_s=t) for k, t in enumerate([99.0, 10.0, 12.0, 11.0, 50.0, 13.0])]
    found = measured(lines, [])
    assert (found.steps, found.t_train_s) == (6, 12.0)


def test_the_newest_dissemination_the_mean_publish_and_the_rate_of_a_worker() -> None:
    lines = [
        line(0, t_bcast_s=8.0, publish_bytes=1000, length_mean=10.0),
        line(1, t_bcast_s=3.0, publish_bytes=50, length_mean=30.0),
    ]
    found = measured(lines, [])
    assert (found.t_bcast_s, found.bytes_per_publish) == (3.0, 525.0)
    assert (found.rollouts_per_worker_per_s, found.reply_tokens) == (2.0, 20.0)


def test_a_run_that_sent_whole_snapshots_only_goes_by_their_size() -> None:
    assert measured([line(0, snapshot_bytes=777)], []).bytes_per_publish == 777


def test_what_was_not_recorded_is_not_known() -> None:
    assert measured([], []) == Measured()
    found = measured([line(0, t_bcast_s=None, workers_active=0)], [])
    assert (found.t_bcast_s, found.t_gen_s, found.bytes_per_publish, found.rollouts_per_worker_per_s) == (None,) * 4


def test_the_time_of_a_group_is_from_its_lease_to_its_submission() -> None:
    events: list[dict[str, Any]] = [
        {"kind": "lease", "lease": "a", "wall_time": 100.0},
        {"kind": "lease", "lease": "b", "wall_time": 100.0},
        {"kind": "submit", "lease": "a", "wall_time": 104.0},
        {"kind": "lease", "lease": "c", "wall_time": 110.0},
        {"kind": "submit", "lease": "c", "wall_time": 118.0},
        {"kind": "submit", "lease": "b", "wall_time": 106.0},
        {"kind": "submit", "lease": "unheard-of", "wall_time": 1.0},
        {"kind": "submit", "lease": 7, "wall_time": "soon"},
        {"kind": "published"},
    ]
    assert measured([line(0)], events).t_gen_s == pytest.approx(6.0)
