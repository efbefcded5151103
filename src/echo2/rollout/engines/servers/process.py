"""An inference server that the worker starts itself.

Invariant: a server that was begun is ended with everything it started, whatever happens to it or to us: its guard ends
it when our side of a pipe closes, and what outlives the guard is killed by its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from echo2.errors import EngineError
from echo2.rollout.engines.servers import guard

END_S = guard.GRACE_S * 2 + 5
"""From closing the life line to killing the guard and its group."""
QUOTED_BYTES = 1 << 14
"""End of the log that is searched for what went wrong."""


class ServerProcess:
    """A running server and the file it writes its words to."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def begin(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> ServerProcess:
        """environment: beside our own. The words of the server before this one stay beside ``log``.

        Raises EngineError when our own interpreter cannot be started; a server that cannot shows as an ``ended`` one.
        """
        with _fresh(log) as words:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", guard.__file__, *command,
                    stdin=PIPE, stdout=words, stderr=words, env={**os.environ, **environment},
                    start_new_session=True,  # Ctrl-C is for the worker, which ends its server in order
                )  # fmt: skip
            except OSError as error:
                raise EngineError(f"the server must start, but: {error}") from error
        return cls(process, log)

    @property
    def pid(self) -> int:
        """Of the guard; its process group is the server's."""
        return self._process.pid

    @property
    def ended(self) -> str | None:
        """How it ended and its last words; None while it runs."""
        code = self._process.returncode
        if code is None:
            return None
        words = self.last_words()
        return f"it ended with exit code {code}" + (f": {words}" if words else "") + f" (all of it: {self._log})"

    def last_words(self) -> str:
        """The last line of the log that names an error, or the last line."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - QUOTED_BYTES))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        named = [line for line in lines if "Error" in line or line.startswith("guard:")]
        return (named or lines or [""])[-1][-300:]

    async def wait(self) -> None:
        await self._process.wait()

    async def end(self) -> None:
        """Also when it has ended. Not to be hurried: a GPU's memory is free only when its processes are gone."""
        assert self._process.stdin is not None, "made with a pipe"
        self._process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._process.wait()
        finally:
            self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """All of the group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _fresh(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_suffix(".previous.log"))
    return log.open("wb")


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
