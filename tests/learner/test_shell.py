from __future__ import annotations

from typing import Any

import pytest

from echo2.config.load import build_config
from echo2.learner.shell import kept_snapshots


@pytest.mark.parametrize(
    ("tables", "kept"),
    [
        ({"staleness": {"budget": 3, "publish_period": 2}}, 3),
        ({"staleness": {"budget": 6, "publish_period": 2}}, 5),
        ({"staleness": {"budget": 11, "publish_period": 2}}, 5),
        ({"run": {"mode": "async"}}, 3),
        ({"run": {"mode": "sync"}}, 2),
        ({"staleness": {"budget": 6, "publish_period": 2}, "learning": {"audit_rows": 0}}, 2),
        (
            {
                "staleness": {"budget": 6, "publish_period": 2},
                "learning": {"learner": "scripted"},
                "rollout": {"engine": "scripted"},
            },
            2,
        ),
        ({"staleness": {"budget": 6, "publish_period": 2}, "rollout": {"engine": "scripted"}}, 2),
    ],
    ids=["three versions", "all of S", "no more than five", "async", "sync", "without audit", "scripted", "rehearsal"],
)
def test_snapshots_are_kept_for_the_versions_that_a_batch_may_hold(tables: dict[str, Any], kept: int) -> None:
    assert kept_snapshots(build_config(tables, check_places=False)) == kept
