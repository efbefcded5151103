from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from echo2.cli.waiting import hang_named, place_of


def _frame_in(path: Path) -> FrameType:
    path.write_text("import sys, json\n\n\ndef reset(inner):\n    return inner()\n")
    found: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), found)
    reset = found["reset"]
    frame = reset(lambda: sys._getframe(1))  # type: ignore[operator]
    assert isinstance(frame, FrameType)
    return frame


def test_a_place_is_the_innermost_line_of_a_persons_own_code(tmp_path: Path) -> None:
    frame = _frame_in(tmp_path / "slow_task.py")
    assert place_of(frame) == f"reset in {tmp_path / 'slow_task.py'}, line 5"
    assert place_of(None) == ""


def test_what_hangs_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    named = threading.Event()

    def hang() -> None:
        deadline_s = time.monotonic() + 60
        while "still waiting" not in capsys.readouterr().err and time.monotonic() < deadline_s:
            named.wait(0.01)
        named.set()

    with hang_named(patience_s=0.02):
        hang()
    assert named.is_set()


def test_what_comes_back_in_time_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    with hang_named(patience_s=60.0):
        pass
    assert capsys.readouterr().err == ""
