"""Jobs done by several real ranks over loopback: ``rank_jobs.py`` is what each of the processes runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from echo2.learner.launcher import environments

SOURCE = Path(__file__).parents[2] / "src"
JOBS = Path(__file__).with_name("rank_jobs.py")


def run_ranks(world: int, job: str, folder: Path, *, deadline_s: float) -> list[int]:
    """Exit code of each rank, in order; those that have not ended by the deadline are killed and fail the test.

    What the job found, rank 0 writes into ``folder``. Output goes to ``folder``/rank-N.log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank, spec in enumerate(environments(world, threads=1)):
        spec = {**spec, "PYTHONPATH": f"{SOURCE}:{JOBS.parent}", "ECHO2_LIFELINE": "0"}
        with (folder / f"rank-{rank}.log").open("ab") as log:
            command = [sys.executable, str(JOBS), job, str(folder)]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **spec}))
    ends_s = time.monotonic() + deadline_s
    try:
        return [process.wait(max(0.1, ends_s - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def told(folder: Path) -> str:
    """All logs, for the message of a failed test."""
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("rank-*.log")))
