"""One process that generates and trains with one copy of the weights, as a real run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo2.run.api import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PATIENCE_S = 280.0


class Quiet:
    def emit(self, kind: str, **fields: Any) -> None: ...


def config(runs: Path, steps: int, **changes: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "run": {"name": "shared", "dir": str(runs), "steps": steps, "mode": "sync"},
        "model": {"path": "tiny:qwen3", "snapshot_dtype": "float32", "warm_start_steps": 60},
        "tasks": [{"name": "arithmetic", "options": {"style": "symbols", "max_operand": 4}}],
        "rollout": {
            "rollouts_per_step": 64, "group_size": 8, "max_new_tokens": 6, "concurrent_groups": 8,
        },
        "learning": {"lr": 5e-4, "threads": 1, "device": "cpu"},
        "workers": {"local": 0, "shared_device": True},
        "coordinator": {"heartbeat_s": 0.2, "dead_after_s": 20.0},
        "eval": {"every_steps": 5, "prompts": 8},
    }  # fmt: skip
    for section, keys in changes.items():
        tables[section] = {**tables[section], **keys}
    return tables


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.02)


def events(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder.root / "events.jsonl").read_text().splitlines()]


def test_a_tiny_model_learns_through_it_and_a_killed_process_resumes(tmp_path: Path) -> None:
    """A device is paid once, every batch is of the version that is trained, and every fifth version is evaluated."""
    with Run(config(tmp_path, 30, provisioning={}), events=Quiet()) as run:

        def enough() -> bool:
            run.new_metrics()
            assert not run.is_over, "the run ended before it could be disturbed"
            return len(run.metrics) >= 8

        wait_for(enough, "step 8")
        assert run._launch is not None
        learner = run._launch._others[0].process
        assert learner is not None
        os.kill(learner.pid, signal.SIGKILL)
        result = run.result()
    lines = {line.step: line for line in result.metrics}
    assert sorted(lines) == list(range(30))
    last = lines[29]
    assert last.staleness_max == 0
    assert last.generated == last.trained + last.expired + last.refused + last.buffered + last.failed
    assert {mismatch.name for mismatch in last.audited.values()} == {"shared"}
    assert all(mismatch.mean_nats < 1e-4 for mismatch in last.audited.values())
    early, late = ([lines[step].reward_trained_mean for step in steps] for steps in (range(5), range(25, 30)))
    assert sum(late) > sum(early) + 0.5, (early, late)
    evaluated = [json.loads(line) for line in (run.folder.root / "evals.jsonl").read_text().splitlines()]
    assert evaluated[-1]["version"] == 30
    assert (run.folder.root / "workers" / "shared" / "credential").exists()


def test_it_generates_before_its_version_is_published(tmp_path: Path) -> None:
    with Run(config(tmp_path, 4), events=Quiet()) as run:
        run.result()
    told = [(event["kind"], event.get("policy")) for event in events(run)]
    for version in ("0.1", "0.2", "0.3"):
        assert told.index(("lease", version)) < told.index(("published", version)), "nobody waits for a disk"
    assert ("published", "0.4") in told
