"""Where the server is: a child of the worker, or somewhere at an address.

Invariant: a host that began serves, or says in a sentence why it does not; every wait for a server has a deadline. A
managed server that is replaced is gone before the next one starts, so that two never share a GPU.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Protocol

from echo2.config.sections import ServerSection
from echo2.errors import EngineError
from echo2.rollout.engines.servers.checkpoint import Checkpoint
from echo2.rollout.engines.servers.dialect import Dialect, Facts
from echo2.rollout.engines.servers.process import ServerProcess, free_port
from echo2.transport.json_line import JsonLine

LOOK_AGAIN_S = 0.25
"""Between two looks at a server that is starting."""
SLOW = "it is well, and did not say in time what it can do"
HEALTH_S = 10.0
"""A well server answers a question about its health within this."""


class Host(Protocol):
    @property
    def is_managed(self) -> bool: ...

    @property
    def line(self) -> JsonLine: ...

    @property
    def life(self) -> int:
        """Number of beginnings; a reply to a request of an earlier life is nobody's."""
        ...

    @property
    def ended(self) -> str | None:
        """Why there is no server, as far as is known without asking; None when there should be one."""
        ...

    async def begin(self, checkpoint: Checkpoint) -> Facts:
        """Serve from now on: a managed server these weights, any other whatever it has. Raises EngineError."""
        ...

    async def ailment(self) -> str | None:
        """What is wrong with the server; None when it says that it is well."""
        ...

    async def close(self) -> None: ...


class ManagedHost:
    def __init__(self, dialect: Dialect, settings: ServerSection, folder: Path, dtype: str, threads: int = 0) -> None:
        """folder: for the server's words.  threads: CPU threads of a server without a GPU; 0 for its own choice."""
        self._dialect = dialect
        self._settings = settings
        self._log = folder / "server.log"
        self._dtype = dtype
        self._threads = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        self._process: ServerProcess | None = None
        self._line: JsonLine | None = None
        self.life = 0

    @property
    def is_managed(self) -> bool:
        return True

    @property
    def line(self) -> JsonLine:
        if self._line is None:
            raise EngineError("the server must run, it does not")
        return self._line

    @property
    def ended(self) -> str | None:
        return "it was not started" if self._process is None else self._process.ended

    async def begin(self, checkpoint: Checkpoint) -> Facts:
        await self._end()
        self.life += 1
        port, key = free_port(), secrets.token_urlsafe(24)
        # Nobody else's: a server that had the port first is not taken for ours.
        name = f"policy-{checkpoint.policy}-{secrets.token_hex(4)}"
        dialect, settings = self._dialect, self._settings
        command = [
            *(settings.command or dialect.command()),
            *dialect.arguments(checkpoint.folder, name, port, self._dtype),
            *settings.arguments,
        ]
        self._process = await ServerProcess.begin(command, {**dialect.environment(key), **self._threads}, self._log)
        self._line = JsonLine(f"http://127.0.0.1:{port}", who=f"{dialect.name} server", key=key)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await self._ready(self._process)
                facts = await dialect.look(self._line, name)
            if (how := self._process.ended) is not None:  # what answered was somebody else, on a port it had first
                raise EngineError(f"the {dialect.name} server must go on, {how}")
            return facts
        except TimeoutError:
            words = self._process.last_words()
            await self._end()
            raise EngineError(
                f"the {dialect.name} server must be ready within server.start_timeout_s = "
                f"{settings.start_timeout_s:g} s, it was not; its last words: {words}"
            ) from None
        except BaseException:
            await self._end()
            raise

    async def _ready(self, process: ServerProcess) -> None:
        while await self.ailment() is not None:
            if (how := process.ended) is not None:
                raise EngineError(f"the {self._dialect.name} server must start, {how}")
            await asyncio.sleep(LOOK_AGAIN_S)

    async def ailment(self) -> str | None:
        if (how := self.ended) is not None:
            return how
        return await _ailment(self.line, self._dialect)

    async def close(self) -> None:
        await self._end()

    async def _end(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.close()
        process, self._process = self._process, None
        if process is not None:
            await process.end()


class ExternalHost:
    """A server that somebody else started; the worker tells it which weights to take, if it can be told."""

    def __init__(self, dialect: Dialect, settings: ServerSection, key: str) -> None:
        self._dialect = dialect
        self._settings = settings
        self.line = JsonLine(settings.url, who=f"{dialect.name} server", key=key)
        self.life = 0

    @property
    def is_managed(self) -> bool:
        return False

    @property
    def ended(self) -> str | None:
        return None

    async def begin(self, checkpoint: Checkpoint) -> Facts:
        self.life += 1
        ailment: str | None = None
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                while True:
                    ailment = await self.ailment()
                    if ailment is None:
                        return await self._dialect.look(self.line, self._settings.model)
                    await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            raise EngineError(
                f"the {self._dialect.name} server at server.url = {self._settings.url} must be well within "
                f"server.start_timeout_s = {self._settings.start_timeout_s:g} s: {ailment or SLOW}"
            ) from None

    async def ailment(self) -> str | None:
        return await _ailment(self.line, self._dialect)

    async def close(self) -> None:
        await self.line.close()


async def _ailment(line: JsonLine, dialect: Dialect) -> str | None:
    try:
        await line.ask("GET", dialect.health_path, deadline_s=HEALTH_S)
    except EngineError as error:
        return str(error)
    return None
