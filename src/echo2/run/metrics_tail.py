"""Metrics lines as they appear in a run's ``metrics.jsonl``.

Invariant: every line is yielded once, in order, whether the file grows or a restarted coordinator wrote it anew; a line
still being written is left for the next look.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from echo2.metrics import StepMetrics


class MetricsTail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = (-1, -1)
        self._seen = (0, 0, 0)
        """(inode, size, mtime) at the last look."""

    def new_lines(self) -> list[StepMetrics]:
        """Lines that were not there at the last look."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return []
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if seen == self._seen:
            return []
        self._seen = seen
        found: list[StepMetrics] = []
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(msgspec.DecodeError):
                metrics = msgspec.json.decode(line, type=StepMetrics)
                place = (metrics.policy_incarnation, metrics.step)
                if place > self._last:
                    self._last = place
                    found.append(metrics)
        return found
