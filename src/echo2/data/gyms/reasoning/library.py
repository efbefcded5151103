"""The door to reasoning-gym for the programs, from any thread.

Invariant: every request ends: with a value, or with a GymError that says why there is none. A request that hangs costs
its process, and nobody else waits for it beyond the processes that are left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from echo2.data.frames import Inbox, packed
from echo2.data.gyms.gym import GymError
from echo2.data.gyms.reasoning.messages import Ask, Done, Ended, Failed, Names, Told, tells

LATE_S = 300.0
"""Real time after which a process is given up: its own limits are of processor time."""
MOST_PROCESSES = 4
_READ_BYTES = 65536
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "VIRTUAL_ENV")
_FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
"""The order of sets decides questions; more threads than one make a fork unsafe."""


class _Process:
    """One process of the library, asked one thing at a time."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _FIXED
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "echo2.data.gyms.reasoning.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the program
        )
        self._inbox = Inbox(tells)

    def exchange(self, ask: Ask) -> Told:
        """Raises GymError where no answer comes; the process is of no use then."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        due = time.monotonic() + LATE_S
        try:
            self._child.stdin.write(packed(ask))
            self._child.stdin.flush()
            while True:
                ready, _, _ = select.select([self._child.stdout], [], [], max(0.0, due - time.monotonic()))
                if not ready:
                    raise GymError(f"reasoning-gym must answer within {LATE_S:g} s, it did not")
                data = os.read(self._child.stdout.fileno(), _READ_BYTES)
                if not data:
                    raise GymError("the process of reasoning-gym ended before it answered; its own words are above")
                for told in self._inbox.feed(data):
                    return told
        except OSError as error:
            raise GymError(f"the process of reasoning-gym cannot be reached: {error}") from error

    def close(self, *, at_once: bool = False) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(0.0 if at_once else 5.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._child.stdout.close()


class Library:
    """Use ``library()``; a program needs only one."""

    def __init__(self, most: int | None = None) -> None:
        self.pid = os.getpid()
        self._turns = threading.BoundedSemaphore(most or min(MOST_PROCESSES, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def ask(self, ask: Ask) -> Any:
        """Wait for the value. Raises GymError where there is none."""
        with self._turns:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or _Process()
            try:
                told = process.exchange(ask)
            except BaseException:
                process.close(at_once=True)
                raise
            with self._lock:
                self._idle.append(process)
        if isinstance(told, Done):
            return told.value
        raise GymError(f"reasoning-gym {_place(ask)}: {_cause(told)}")

    def close(self) -> None:
        if self.pid != os.getpid():
            return  # a fork's copy: the processes belong to the parent
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()


def _place(ask: Ask) -> str:
    return "its names" if isinstance(ask, Names) else ask.environment


def _cause(told: Failed | Ended) -> str:
    if isinstance(told, Failed):
        return told.reason
    if told.cause == "lost":
        return "its process was killed from outside or crashed"
    return f"it passed its limit of {'processor time' if told.cause == 'time' else 'memory'}"


_shared: Library | None = None
_shared_lock = threading.Lock()


def library() -> Library:
    """This process's library; a forked process gets its own."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = Library()
            atexit.register(_shared.close)
        return _shared
