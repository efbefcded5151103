"""One process that generates and trains with one copy of the weights, as a real run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from echo2.config.load import load_config
from echo2.run.api import Run, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PATIENCE_S = 280.0


class Quiet:
    def emit(self, kind: str, **fields: Any) -> None: ...


EXAMPLE = Path(__file__).parents[2] / "examples" / "one_gpu" / "tiny.toml"


def config(runs: Path, name: str, steps: int, **workers: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "dir": str(runs), "steps": steps, "mode": "sync"},
        "model": {"path": "tiny:qwen3", "snapshot_dtype": "float32", "warm_start_steps": 30},
        "tasks": [{"name": "arithmetic", "options": {"style": "symbols"}}],
        "rollout": {"rollouts_per_step": 64, "group_size": 8, "max_new_tokens": 6, "concurrent_groups": 8},
        "learning": {"lr": 3e-4, "threads": 1, "device": "cpu"},
        "workers": workers,
        "coordinator": {"heartbeat_s": 0.2, "dead_after_s": 20.0},
        "eval": {"every_steps": 5, "prompts": 4},
    }


SHARED: dict[str, Any] = {"local": 0, "shared_device": True}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.02)


def lines_of(run: Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder.root / name).read_text().splitlines()]


def test_it_trains_on_what_a_worker_with_a_copy_would_have_sent_and_waits_for_no_publish(tmp_path: Path) -> None:
    """Seeds, prompts and weights are those of a synchronous run with a worker, so the replies are the same."""
    with Run(config(tmp_path, "shared", 4, **SHARED), events=Quiet()) as run:
        shared = run.result()
    with Run(config(tmp_path, "apart", 4, local=1, threads=1), events=Quiet()) as apart_run:
        apart = apart_run.result()
    assert [line.reward_trained_mean for line in shared.metrics] == [line.reward_trained_mean for line in apart.metrics]
    assert [line.length_mean for line in shared.metrics] == [line.length_mean for line in apart.metrics]
    told = [(event["kind"], event.get("policy")) for event in lines_of(run, "events.jsonl")]
    # A publish can be the quicker one by chance. The rule itself: tests/coordinator/test_resident.py.
    order = [(told.index(("lease", version)), told.index(("published", version))) for version in ("0.1", "0.2", "0.3")]
    assert any(leased < published for leased, published in order)
    assert ("published", "0.4") in told


def test_a_killed_process_resumes_and_every_batch_is_of_the_version_that_is_trained(tmp_path: Path) -> None:
    with Run(config(tmp_path, "killed", 10, **SHARED), events=Quiet()) as run:

        def enough() -> bool:
            run.new_metrics()
            assert not run.is_over, "the run ended before it could be disturbed"
            return len(run.metrics) >= 4

        wait_for(enough, "step 4")
        assert run._launch is not None
        learner = run._launch._others[0].process
        assert learner is not None
        os.kill(learner.pid, signal.SIGKILL)
        result = run.result()
    lines = {line.step: line for line in result.metrics}
    assert sorted(lines) == list(range(10))
    assert all(line.staleness_max == 0 for line in lines.values())
    last = lines[9]
    assert last.generated == last.trained + last.expired + last.refused + last.buffered + last.failed
    assert {mismatch.name for mismatch in last.audited.values()} == {"shared"}
    assert all(mismatch.mean_nats < 1e-4 for mismatch in last.audited.values())
    assert lines_of(run, "evals.jsonl")[-1]["version"] == 10
    attached = [event["step"] for event in lines_of(run, "events.jsonl") if event["kind"] == "learner_attached"]
    assert len(attached) == 2
    assert attached[1] >= 3, "it goes on from its newest checkpoint"


@pytest.mark.slow
def test_a_tiny_model_learns_through_it(tmp_path: Path) -> None:
    run = load_config(EXAMPLE, [f"run.dir={tmp_path}", "run.steps=40", "learning.threads=1"])
    rewards = [line.reward_trained_mean for line in train(run, events=Quiet()).metrics]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.1, rewards
