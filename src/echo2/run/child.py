"""One program of a run as a process of this machine.

Invariant: a child never outlives the supervisor (its standard input is a life line), and a child that keeps dying is
given up with the last words of its log instead of being restarted for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from echo2.ports import EventLog
from echo2.rollout.engines import SERVERS
from echo2.shell import LIFELINE_VARIABLE

RESTART_FIRST_S = 0.5
RESTART_MOST_S = 20.0
CRASHES_ALLOWED = 5
"""Crashes in a row, each within ``HEALTHY_S`` of its start, after which a program is given up."""
HEALTHY_S = 120.0
"""A program that ran for so long starts again with a clean slate."""
LAST_PATIENCE_S = 5.0
"""Between asking and making, when the whole run fails."""
LOG_TAIL_BYTES = 8192


class Ending(StrEnum):
    LEFT = "left"
    """Exit code 0: it had nothing more to do."""
    USER_ERROR = "user error"
    """Exit code 2: the user's input is wrong; starting again would not help."""
    GIVEN_UP = "given up"
    """It kept dying."""


class ChildSpec(msgspec.Struct, frozen=True):
    name: str
    arguments: tuple[str, ...]
    """What follows ``program``."""
    log: Path
    threads: int = 0
    """CPU threads; 0 leaves the libraries' choice."""
    program: tuple[str, ...] = (sys.executable, "-m", "echo2")
    restartable: bool = True
    """Whether exit code 1 is worth another try; death by a signal always is."""


class Child:
    def __init__(self, spec: ChildSpec, events: EventLog) -> None:
        self.spec = spec
        self._events = events
        self.process: asyncio.subprocess.Process | None = None
        self.crashes = 0
        self.restarts = 0
        self.is_over = False
        """The program will not be started again."""
        self._dismissed = False

    async def run(self) -> Ending:
        """Keep the program running until it leaves, is the user's fault, or keeps dying."""
        try:
            return await self._run_again_and_again()
        finally:
            self.is_over = True

    async def _run_again_and_again(self) -> Ending:
        clock = asyncio.get_running_loop().time
        while not self._dismissed:
            started_s = clock()
            code = await self._run_once()
            if code == 0 or self._dismissed:
                return Ending.LEFT
            if code == 2:
                return Ending.USER_ERROR
            self.crashes = 1 if clock() - started_s > HEALTHY_S else self.crashes + 1
            if self.crashes >= CRASHES_ALLOWED or (code > 0 and not self.spec.restartable):
                return Ending.GIVEN_UP
            self.restarts += 1
            self._events.emit("program_restarted", program=self.spec.name, exit_code=code, restarts=self.restarts)
            await asyncio.sleep(min(RESTART_MOST_S, RESTART_FIRST_S * 2.0 ** (self.crashes - 1)))
        return Ending.LEFT

    async def _run_once(self) -> int:
        with self.spec.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.spec.program, *self.spec.arguments,
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log,
                env=environment(os.environ, self.spec.threads),
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends everybody in order
            )  # fmt: skip
        self.process = process
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await self.end(LAST_PATIENCE_S)

    async def end(self, patience_s: float) -> None:
        """Ask the running process to leave; make it after ``patience_s``. It is not started again."""
        self._dismissed = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def last_words(self) -> str:
        """The sentence the program ended with, or the last line of its log."""
        lines = _tail(self.spec.log)
        sentences = [line.removeprefix("echo2:").strip() for line in lines if line.startswith("echo2:")]
        return sentences[-1] if sentences else lines[-1] if lines else f"{self.spec.name} said nothing"


def environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """Environment of a child: its life line, unbuffered output, and its share of the CPU."""
    child = {**base, LIFELINE_VARIABLE: "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Idle OpenMP threads spin by default; with several programs on few cores that takes most of everybody's time.
    child.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads:
        child |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return child


def server_arguments(engine: str, config: Path) -> tuple[str, ...]:
    """Of a worker on the coordinator's own machine: its inference server is the one that the run's file describes."""
    return ("--server", str(config)) if engine in SERVERS else ()


def _tail(path: Path) -> Sequence[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()]
