"""Stands between a worker and the inference server it started, so that nothing is left behind.

Invariant: when the worker is gone, however it went, or the server's first process is, every process of the server ends
within ``GRACE_S``. Standard input is the worker's life line. Run as a file, with the standard library alone:

    python -I guard.py COMMAND …
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
"""From asking the server to end to making it."""
LOOK_S = 0.2
"""Between two looks at the server."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    _process_control(PR_SET_CHILD_SUBREAPER, 1)  # so that what the server's processes leave behind comes to us
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard)
    except OSError as error:
        print(f"guard: cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    while server.poll() is None and not asked:
        with contextlib.suppress(InterruptedError):
            if select.select([sys.stdin], [], [], LOOK_S)[0] and not os.read(sys.stdin.fileno(), 4096):
                break  # the worker is gone, or closed the line
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)
    _end_the_rest()
    code = server.wait()
    return code if code >= 0 else 128 - code


def _die_with_guard() -> None:
    _process_control(PR_SET_PDEATHSIG, signal.SIGKILL)


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_the_rest() -> None:
    """Kill whatever else is in our group or came to us as an orphan, until nothing is."""
    until_s = time.monotonic() + GRACE_S
    while (rest := _rest()) and time.monotonic() < until_s:
        for pid in rest:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _rest() -> list[int]:
    """Other living processes of our group, and our children. Empty where there is no /proc."""
    own, found = os.getpid(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdecimal() or int(name) == own:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, group = file.read().rpartition(b")")[2].split()[:3]
        except OSError:
            continue
        if state != b"Z" and own in (int(parent), int(group)):
            found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
