"""A worker process whose rewards are not what its replies score, among honest ones, over real lines and disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo2.run.api import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SUPPORT = Path(__file__).parents[1] / "support"
PATIENCE_S = 120.0


class Quiet:
    def emit(self, kind: str, **fields: Any) -> None: ...


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.05)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    path = run.folder.root / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["kind"] == kind]


def worker(join: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A life of the liar."""
    environment = {**os.environ, "ECHO2_TEST_GENEROUS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", "echo2", "worker", join, "--name", "liar", "--dir", str(folder)],
        env=environment, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_worker_that_adds_reward_is_caught_and_the_honest_ones_carry_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(SUPPORT)
    tables = {
        "run": {"name": "liar", "dir": str(tmp_path), "steps": 400},
        "tasks": [{"name": "generous:Generous"}],
        "rollout": {"engine": "scripted", "rollouts_per_step": 16, "group_size": 4},
        "learning": {"learner": "scripted"},
        "rehearsal": {"train_s": 0.01, "group_s": 0.5, "snapshot_bytes": 20_000},  # every worker is needed
        "workers": {"local": 2},
        "coordinator": {"heartbeat_s": 0.2, "dead_after_s": 20.0, "rescored_share": 0.25},
    }
    run = Run(tables, events=Quiet())
    with run:
        wait_for(lambda: len(run.new_metrics() or run.metrics) >= 2, "the first steps")
        liar = worker(run.join_string(), tmp_path / "w")
        assert liar.returncode == 1, liar.stderr
        sentence = liar.stderr.strip().splitlines()[-1]
        assert sentence.startswith("echo2: this run takes no more work of worker liar: it sent the reward "), sentence
        (row,) = run.status().set_aside
        assert row["name"] == "liar"
        steps = len(run.metrics)
        wait_for(lambda: len(run.new_metrics() or run.metrics) >= steps + 2, "steps after it")
        # It comes back with the credential it has, and is told the same.
        again = worker(run.join_string(), tmp_path / "w")
        assert (again.returncode, again.stderr.strip().splitlines()[-1]) == (1, sentence)
        run.stop("seen enough")
        result = run.result()
    last = result.metrics[-1]
    assert list(last.set_aside.values()) == [f"liar: {row['reason']}"]
    assert last.rescored > 20 and last.rescored_differing == 1 and last.rescoring_failed == 0
    for line in result.metrics:
        assert line.generated == line.trained + line.expired + line.refused + line.buffered + line.failed
    (told,) = events(run, "worker_set_aside")
    submitted = [event for event in events(run, "submit") if event["worker"] == told["worker"]]
    assert 1 <= len(submitted) <= 40, "caught within a few groups"
