"""How many CPU threads a program takes.

Invariant: programs that are started together share a machine's cores, and none takes more than its process may use.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LIMIT_VARIABLE = "OMP_NUM_THREADS"
"""Set by whoever gives one process its share: a supervisor, Ray, a batch system."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process and its children may use: by affinity, or by control group where that allows less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = QUOTA.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def own_threads() -> int:
    """Threads of a program that nobody gave a number: all usable cores, or as many as OMP_NUM_THREADS leaves it."""
    told = os.environ.get(LIMIT_VARIABLE, "").partition(",")[0]  # a list is one number for each nesting
    return min(usable_cores(), int(told)) if told.isdigit() and int(told) else usable_cores()


def share_of(cores: int, programs: int) -> int:
    """Threads of each of so many programs that compute side by side; more threads than cores serve nobody."""
    return max(1, cores // max(1, programs))
