"""Comparison of expressions for the programs: from any thread, from asyncio, from any process.

Invariant: a comparison ends, whatever is compared, and holds up nobody else's. Its limits are the lanes' own
(``lane.py``); this side only waits. What could not be judged is a GradingError, never a verdict.

One grader process serves a program; it is started by the first comparison and ends with the program, even a killed one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import IO

from echo2.data.maths.frames import Ask, Broken, Inbox, Outcome, Told, packed
from echo2.errors import Echo2Error

PATIENCE_S = 600.0
"""Longest wait for an outcome, queueing included; lanes give up long before."""
LEAST_LANES, MOST_LANES = 4, 16
"""Four even on one core: as many hostile replies must be at work before an honest one waits."""
_READ_BYTES = 65536
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "VIRTUAL_ENV")


class GradingError(Echo2Error):
    """A comparison could not be made; the row fails and is no zero (I4)."""


class _GraderGone(GradingError):
    """The grader process ended; worth one more try."""


class _Process:
    """One life of the grader process."""

    def __init__(self, lanes: int) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "echo2.data.maths.warden", str(lanes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the program
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._stdin: IO[bytes] = self._child.stdin
        self._stdout: IO[bytes] = self._child.stdout
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Outcome]] = {}
        self._gone: GradingError | None = None
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def is_gone(self) -> bool:
        return self._gone is not None

    def submit(self, ask: Ask) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            if self._gone is None:
                self._pending[ask.number] = future
                self._queue.put(packed(ask))
                return future
        future.set_exception(self._gone)
        return future

    def close(self) -> None:
        self._queue.put(None)
        try:
            self._child.wait(5.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for thread in self._threads:
            thread.join(5.0)
        self._stdout.close()

    def _write(self) -> None:
        """A thread of its own, so that nobody who asks waits for a pipe."""
        with contextlib.suppress(OSError):  # the reader says why
            while (data := self._queue.get()) is not None:
                self._stdin.write(data)
                self._stdin.flush()
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _read(self) -> None:
        inbox = Inbox()
        reason: GradingError | None = None
        while data := os.read(self._stdout.fileno(), _READ_BYTES):
            for frame in inbox.feed(data):
                if isinstance(frame, Told):
                    with self._lock:
                        future = self._pending.pop(frame.number, None)
                    if future is not None and future.set_running_or_notify_cancel():
                        future.set_result(frame.outcome)
                elif isinstance(frame, Broken):
                    reason = GradingError(f"answers cannot be compared here: {frame.reason}")
        with self._lock:
            self._gone = reason or _GraderGone("the grader process ended before it answered")
            pending, self._pending = self._pending, {}
        self._queue.put(None)
        for future in pending.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._gone)


class Grader:
    """Use ``grader()``; a program needs only one."""

    def __init__(self, lanes: int | None = None) -> None:
        self.pid = os.getpid()
        self._lanes = lanes or min(MOST_LANES, max(LEAST_LANES, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._number = 0

    def compare(self, gold: str, answer: str) -> Outcome:
        """Wait for the outcome. Raises GradingError where there is none."""
        try:
            return _judgement(gold, self._submit(gold, answer).result(PATIENCE_S))
        except _GraderGone:
            return _judgement(gold, self._submit(gold, answer).result(PATIENCE_S))
        except TimeoutError as error:
            raise GradingError(f"a comparison must end within {PATIENCE_S:g} s, it did not") from error

    async def compare_soon(self, gold: str, answer: str) -> Outcome:
        """``compare`` for asyncio: other tasks go on."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                try:
                    return _judgement(gold, await asyncio.wrap_future(self._submit(gold, answer)))
                except _GraderGone:
                    return _judgement(gold, await asyncio.wrap_future(self._submit(gold, answer)))
        except TimeoutError as error:
            raise GradingError(f"a comparison must end within {PATIENCE_S:g} s, it did not") from error

    def unusable(self, golds: Sequence[str]) -> list[str | None]:
        """Why each gold cannot be compared with anything, itself included; None where it can."""
        futures = [self._submit(gold, gold) for gold in golds]
        return [_fault(future.result(PATIENCE_S)) for future in futures]

    def close(self) -> None:
        if self.pid != os.getpid():
            return  # a fork's copy: the process belongs to the parent
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _submit(self, gold: str, answer: str) -> Future[Outcome]:
        with self._lock:
            ended = None
            if self._process is not None and self._process.is_gone:
                ended, self._process = self._process, None
            if self._process is None:
                self._process = _Process(self._lanes)
            self._number += 1
            future = self._process.submit(Ask(self._number, gold, answer))
        if ended is not None:
            ended.close()
        return future


def _judgement(gold: str, outcome: Outcome) -> Outcome:
    if outcome == "lost":
        raise GradingError("a comparison was lost: its process was killed from outside or starved of processor time")
    if outcome in ("gold_unreadable", "gold_too_costly"):
        raise GradingError(f"the gold answer {gold[:80]!r} cannot be compared ({outcome}); correct it in the data")
    return outcome


def _fault(outcome: Outcome) -> str | None:
    return {
        "equal": None,
        "gold_unreadable": "it is no expression that can be read",
        "gold_too_costly": "reading it takes too much time or memory",
        "too_costly": "comparing it takes too much time or memory",
        "lost": "comparing it ended without an outcome",
    }.get(outcome, "it does not equal itself")


_shared: Grader | None = None
_shared_lock = threading.Lock()


def grader() -> Grader:
    """This process's grader; a forked process gets its own."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = Grader()
            atexit.register(_shared.close)
        return _shared
