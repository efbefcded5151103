"""Where a command is that does not come back, told to whoever waits for it.

Invariant: nothing is ended, only named: the line of a task's own file that runs now. What the standard library and this
package do meanwhile is not a person's code and is passed over.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from echo2.cli.output import note

PATIENCE_S = 10.0
_OURS = str(Path(__file__).parent.parent)
_PYTHONS = sysconfig.get_paths()["stdlib"]
_INSTALLED = sysconfig.get_paths()["purelib"]


@contextlib.contextmanager
def hang_named(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Inside, every ``patience_s`` that go by are told once for each place in which they went by."""
    done = threading.Event()
    asked = threading.get_ident()

    def watch() -> None:
        named: set[str] = set()
        while not done.wait(patience_s):
            place = place_of(sys._current_frames().get(asked))
            if place and place not in named:
                named.add(place)
                note(f"echo2: still waiting for {place}; Ctrl-C ends it")

    threading.Thread(target=watch, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def place_of(frame: FrameType | None) -> str:
    """The innermost frame that is a person's own code; empty where there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_python = file.startswith(("<", _PYTHONS)) and not file.startswith(_INSTALLED)
        if not is_python and not file.startswith(_OURS):
            return f"{frame.f_code.co_qualname} in {file}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""
