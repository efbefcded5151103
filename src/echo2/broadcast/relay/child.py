"""One relay process, as the program that started it holds it.

Invariant: a process that was begun is ended, whatever happens: by closing its orders, and by force when that does not
help within ``Patience.end_s``. A frozen one is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

import msgspec

from echo2.broadcast.relay.channel import encode_message, read_word
from echo2.broadcast.relay.control import AnyWord, Event, Listening, Open, Order
from echo2.errors import Malformed, TransportError, UserError


class Patience(msgspec.Struct, frozen=True):
    """Of a program with its relay process."""

    start_s: float = 30.0
    """From starting it to hearing where it listens."""
    look_s: float = 10.0
    looks: int = 3
    """A relay that says nothing between so many looks is frozen. Looks are counted, not seconds: after the program
    itself stood still, what was said lies unread."""
    end_s: float = 5.0
    """From asking it to end to making it."""
    first_pause_s: float = 0.5
    most_pause_s: float = 20.0
    """Between one relay process and the next; doubles from failure to failure."""
    healthy_s: float = 60.0
    """A relay that lived for less failed."""
    failures: int = 5
    """In a row, after which nobody waits for the next relay process."""


class RelayChild:
    """A process that listens on ``port``."""

    def __init__(self, process: Process, port: int, patience: Patience) -> None:
        self._process = process
        self._patience = patience
        self._heard = 0
        """Words so far."""
        self.port = port

    @classmethod
    async def begin(cls, command: Sequence[str], opening: Open, patience: Patience) -> RelayChild:
        """Raises UserError when the relay cannot listen as told; TransportError, OSError when it does not start."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the program, which ends its relay in order
        )  # fmt: skip
        try:
            _write(process, opening)
            async with asyncio.timeout(patience.start_s):
                return cls(process, await _hear_port(process), patience)
        except TimeoutError:
            await _end(process, 0.0)
            raise TransportError(f"the relay process did not start within {patience.start_s:g} s") from None
        except BaseException:
            await _end(process, 0.0)
            raise

    def send(self, order: Order) -> None:
        """Without waiting: a relay that does not read is frozen, and the next one is told everything."""
        _write(self._process, order)

    async def listen(self, hear: Callable[[AnyWord], None]) -> str:
        """Give every word to ``hear`` until the process ends; return why it did, and end it for good."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch())
                try:
                    return await self._listen(hear)
                finally:
                    watching.cancel()
        finally:
            await self.end()

    async def end(self) -> None:
        """Also when it has ended, and when it was never listened to."""
        await _end(self._process, self._patience.end_s)

    async def _listen(self, hear: Callable[[AnyWord], None]) -> str:
        try:
            while (word := await read_word(_words(self._process))) is not None:
                self._heard += 1
                hear(word)
        except Malformed as error:
            return str(error)
        return f"exit code {await self._process.wait()}"

    async def _watch(self) -> None:
        quiet = 0
        while quiet < self._patience.looks:
            heard = self._heard
            await asyncio.sleep(self._patience.look_s)
            quiet = quiet + 1 if self._heard == heard else 0
        _kill(self._process)


async def _hear_port(process: Process) -> int:
    why = ""
    try:
        while (word := await read_word(_words(process))) is not None:
            if isinstance(word, Listening):
                return word.port
            if isinstance(word, Event) and word.kind == "relay_failed":
                why = str(word.fields["error"])
    except Malformed as error:
        why = str(error)
    code = await process.wait()
    if code == 2:
        raise UserError(why)
    raise TransportError(why or f"the relay process ended with exit code {code} before it listened")


async def _end(process: Process, patience_s: float) -> None:
    assert process.stdin is not None, "made with a pipe"
    process.stdin.close()
    try:
        async with asyncio.timeout(patience_s):
            await _gone(process)
    except TimeoutError:
        _kill(process)
        await _gone(process)
    except BaseException:
        _kill(process)
        raise


async def _gone(process: Process) -> None:
    """What the process still says is not heard."""
    await _words(process).read()
    await process.wait()


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _write(process: Process, order: Order) -> None:
    assert process.stdin is not None, "made with a pipe"
    process.stdin.write(encode_message(order))


def _words(process: Process) -> asyncio.StreamReader:
    assert process.stdout is not None, "made with a pipe"
    return process.stdout
