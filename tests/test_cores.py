from __future__ import annotations

import os
from pathlib import Path

import pytest

from echo2 import cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of a machine without control groups, until a test writes the file."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.delenv(cores.LIMIT_VARIABLE, raising=False)
    return tmp_path / "cpu.max"


def test_a_program_alone_takes_every_core_that_it_may_use() -> None:
    assert cores.usable_cores() == cores.own_threads() == 8


@pytest.mark.parametrize(
    ("quota", "usable"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("spoilt", 8)],
)
def test_a_control_group_can_only_take_cores_away(eight_cores: Path, quota: str, usable: int) -> None:
    eight_cores.write_text(quota + "\n")
    assert cores.usable_cores() == usable


@pytest.mark.parametrize(("told", "threads"), [("3", 3), ("3,1", 3), ("64", 8), ("", 8), ("0", 8), ("many", 8)])
def test_whoever_started_a_program_may_limit_its_threads(
    monkeypatch: pytest.MonkeyPatch, told: str, threads: int
) -> None:
    """As Ray does for what an actor starts."""
    monkeypatch.setenv(cores.LIMIT_VARIABLE, told)
    assert cores.own_threads() == threads
    assert cores.usable_cores() == 8


@pytest.mark.parametrize(("programs", "each"), [(0, 8), (1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_programs_side_by_side_share_the_cores(programs: int, each: int) -> None:
    assert cores.share_of(8, programs) == each
