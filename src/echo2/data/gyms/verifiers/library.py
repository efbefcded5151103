"""The door to verifiers for the programs: one process per environment, many episodes in it.

Invariant: every request ends: with a value or an episode, or with a GymError that says why there is none. An episode
that nobody waits for any more is stopped; a process that does not obey within ``OBEY_S`` is killed, and its other
episodes fail. The next request starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from echo2.data.frames import Inbox, packed
from echo2.data.gyms.gym import GymError
from echo2.data.gyms.verifiers.messages import (
    Ask,
    Count,
    Load,
    Lost,
    Open,
    Play,
    Played,
    Reply,
    Say,
    Stop,
    Told,
    Value,
    tells,
)
from echo2.data.task import Message

PATIENCE_S = 1800.0
"""Real time for a value: an environment may fetch its data first."""
OBEY_S = 20.0
_READ_BYTES = 65536
_LOOPBACK = "127.0.0.1,localhost"

Hearer = Callable[[Told], None]


class _Process:
    """One life of the process."""

    def __init__(self) -> None:
        environment = dict(os.environ)  # an environment's judges may need keys of their own
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(part for part in (environment.get(name), _LOOPBACK) if part)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "echo2.data.gyms.verifiers.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the program
        )
        self._lock = threading.Lock()
        self._hearers: dict[int, Hearer] = {}
        self._number = 0
        self.is_gone = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, make: Callable[[int], Ask], hearer: Hearer) -> int:
        """Send a request; ``hearer`` is called in another thread with all that is told of it."""
        with self._lock:
            self._number += 1
            number = self._number
            self._hearers[number] = hearer
        self.send(make(number))
        return number

    def send(self, ask: Ask) -> None:
        assert self._child.stdin is not None
        try:
            with self._lock:
                self._child.stdin.write(packed(ask))
                self._child.stdin.flush()
        except (OSError, ValueError):
            self._lose(ask.number)

    def stop(self, number: int) -> None:
        """See to it that a request ends soon, if it has not ended."""
        with self._lock:
            if number not in self._hearers:
                return
            self._hearers[number] = _deaf
        self.send(Stop(number))
        timer = threading.Timer(OBEY_S, self._kill_unless_ended, [number])
        timer.daemon = True
        timer.start()

    def close(self, *, at_once: bool = False) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(0.0 if at_once else 10.0)
        except subprocess.TimeoutExpired:
            self._kill()
            self._child.wait()
        self._reader.join(5.0)
        self._child.stdout.close()

    def _kill_unless_ended(self, number: int) -> None:
        with self._lock:
            ended = number not in self._hearers
        if not ended:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._child.stdout is not None
        inbox = Inbox(tells)
        with contextlib.suppress(ValueError, msgspec.MsgspecError):
            while data := os.read(self._child.stdout.fileno(), _READ_BYTES):
                for told in inbox.feed(data):
                    with self._lock:
                        hearer = self._hearers.get(told.number, _deaf)
                        if not isinstance(told, Say):
                            self._hearers.pop(told.number, None)
                    hearer(told)
        self.is_gone = True
        with self._lock:
            open_numbers = list(self._hearers)
        for number in open_numbers:
            self._lose(number)

    def _lose(self, number: int) -> None:
        with self._lock:
            hearer = self._hearers.pop(number, _deaf)
        hearer(Lost(number, "its process ended before it answered; its own words are above"))


def _deaf(told: Told) -> None:
    """Of what nobody waits for."""


class Stage:
    """An environment, in a process that is started when something is first asked of it."""

    def __init__(self, environment: str, args: dict[str, Any], settings: dict[str, Any]) -> None:
        self._named = (environment, args, settings)
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def check(self) -> None:
        """Raises GymError for an environment that cannot be had."""
        self._open()

    def count(self) -> int | None:
        found: int | None = self._value(self._open(), Count)
        return found

    def load(self, position: int) -> dict[str, Any]:
        row: dict[str, Any] = self._value(self._open(), lambda number: Load(number, position))
        return row

    async def play(self, data: dict[str, Any], say: Callable[[list[Message]], Awaitable[str]]) -> Played:
        """One episode; what ``say`` raises ends it and is raised here."""
        process = await asyncio.to_thread(self._open)
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[Told] = asyncio.Queue()

        def hear(frame: Told) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(told.put_nowait, frame)

        number = process.begin(lambda number: Play(number, data), hear)
        try:
            while isinstance(frame := await told.get(), Say):
                process.send(Reply(number, await say(frame.messages)))
        finally:
            process.stop(number)
        return _episode(frame)

    def answer(self, data: dict[str, Any], reply: str) -> Played:
        """An episode in which ``reply`` is all that the policy says. Raises GymError where more is asked of it."""
        process = self._open()
        told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        number = process.begin(lambda number: Play(number, data), told.put)
        try:
            replies = [reply]
            while isinstance(frame := _next(told), Say):
                if not replies:
                    raise GymError("the episode takes several turns: one reply cannot be scored alone")
                process.send(Reply(number, replies.pop()))
        finally:
            process.stop(number)
        return _episode(frame)

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _open(self) -> _Process:
        with self._lock:
            if self._process is not None and self._process.is_gone:
                self._process.close()
                self._process = None
            if self._process is None:
                process = _Process()
                try:
                    self._value(process, lambda number: Open(number, *self._named))
                except BaseException:
                    process.close(at_once=True)
                    raise
                self._process = process
            return self._process

    def _value(self, process: _Process, make: Callable[[int], Ask]) -> Any:
        told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        number = process.begin(make, told.put)
        try:
            frame = _next(told)
        finally:
            process.stop(number)
        if isinstance(frame, Value):
            return frame.value
        assert isinstance(frame, Lost), "a value has no other end"
        raise GymError(frame.reason)


def _next(told: queue.SimpleQueue[Told]) -> Told:
    try:
        return told.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise GymError(f"it must answer within {PATIENCE_S:g} s, it did not") from None


def _episode(frame: Told) -> Played:
    if isinstance(frame, Played):
        return frame
    assert isinstance(frame, Lost), "an episode has no other end"
    raise GymError(frame.reason)
