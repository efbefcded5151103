from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_bench(*arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.broadcast_wan", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_machine_without_the_programs_it_needs_is_told_so_in_one_line() -> None:
    report = run_bench(PATH="/nowhere")
    assert list(report) == ["skipped"]


@pytest.mark.integration
def test_every_worker_has_the_object_and_nothing_is_left_behind() -> None:
    report = run_bench("--workers", "2", "--worker-mbps", "40", "--rtt-ms", "10", "--mib", "2", "--scheme", "chain")
    if "skipped" in report:
        pytest.skip(report["skipped"])
    run = report["schemes"]["chain"]["runs"][0]
    assert set(run["arrived_s"]) == {"1", "2"}
    assert report["schemes"]["chain"]["share_ratio"] >= 1.0, "no scheme beats the bound"
    left = [path.name for folder in ("/run/netns", "/dev/shm") for path in Path(folder).glob("echo2b*")]
    assert not [name for name in left if not Path(f"/proc/{name[6:].partition('-')[0]}").exists()]
