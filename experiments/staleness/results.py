"""Lines of results on disk.

Invariant: a line is whole or is not read; what was written stays, whoever else writes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments import common
from experiments.staleness.cells import Cell

Line = dict[str, Any]


def append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read() != b"\n":  # a line whose writer was killed
                file.write(b"\n")
        file.write(json.dumps(common.rounded(line)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Line]:
    """One line for each run, the first that was written."""
    if not path.exists():
        return []
    found: dict[Cell, Line] = {}
    for text in path.read_text().splitlines():
        try:
            line: Line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found.setdefault(cell_of(line), line)
    return [*found.values()]


def cell_of(line: Mapping[str, Any]) -> Cell:
    return Cell(*(line[name] for name in Cell._fields))


def done(lines: Iterable[Mapping[str, Any]]) -> set[Cell]:
    return {cell_of(line) for line in lines}


def final(line: Mapping[str, Any]) -> float:
    """Mean held-out reward of the versions of the last tenth of the steps; 0 for a run that is no longer finite."""
    if not line["finite"]:
        return 0.0
    rewards = {int(version): reward for version, reward in line["rewards"].items()}
    steps = max(rewards)
    return fmean(reward for version, reward in rewards.items() if version > 0.9 * steps)
