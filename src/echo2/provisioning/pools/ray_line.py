"""The pool's end of the line to the process that is Ray's driver.

Invariant: no call waits for a process that has ended: it gets TransportError with the reason, and the next call begins
another process. A process that was begun is ended when the line is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio import Future
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from echo2.errors import Refused, TransportError
from echo2.provisioning.pools.ray_messages import MAX_LINE_BYTES, Call, Connect, Reply, encode, read_reply

DRIVER = (sys.executable, "-m", "echo2.provisioning.pools.ray_driver")
CONNECT_S = 25.0
"""From starting the process to its word that it is connected; importing Ray alone takes a second or two."""
END_S = 8.0


class RayLine:
    """Use as a context."""

    def __init__(self, address: str, namespace: str, log: Path, program: Sequence[str] = DRIVER) -> None:
        """log: where the process and Ray write what they have to say to people."""
        self._connect = Connect(0, address, namespace)
        self._log = log
        self._program = tuple(program)
        self._group = asyncio.TaskGroup()
        self._beginning = asyncio.Lock()
        self._process: Process | None = None
        self._last_number = 0
        self._waiting: dict[int, Future[Reply]] = {}

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._process is not None:
            await _end(self._process)
        await self._group.__aexit__(None, None, None)  # an error of the body is not the group's and stays as it is

    async def call(self, make: Callable[[int], Call]) -> Reply:
        """What the process replies to the call that ``make`` makes of a number.

        Raises TransportError when Ray or the process does not answer, Refused when it says no. Cancelling ends the
        wait; the call may be carried out all the same.
        """
        process = await self._connected()
        assert process.stdin is not None, "made with a pipe"
        self._last_number = number = self._last_number + 1
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write(encode(make(number)))
            return _checked(await waiter)
        finally:
            del self._waiting[number]

    async def _connected(self) -> Process:
        async with self._beginning:
            if self._process is None:
                process = await self._begin()
                self._process = process
                self._group.create_task(self._read(process), name="replies of the line to Ray")
            return self._process

    async def _begin(self) -> Process:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._program, stdin=PIPE, stdout=PIPE, stderr=log, limit=MAX_LINE_BYTES,
                start_new_session=True,  # Ctrl-C reaches the program, which ends its line in order
            )  # fmt: skip
        try:
            assert process.stdin is not None, "made with a pipe"
            process.stdin.write(encode(self._connect))
            async with asyncio.timeout(CONNECT_S):
                reply = await _read_one(process)
            if reply is None:
                raise TransportError(f"the process of the ray pool ended before it was connected; see {self._log}")
            _checked(reply)
        except TimeoutError:
            await _kill(process)
            raise TransportError(
                f"Ray at {self._connect.address} did not answer within {CONNECT_S:g} s; see {self._log}"
            ) from None
        except BaseException:
            await _kill(process)
            raise
        return process

    async def _read(self, process: Process) -> None:
        """Give replies to their callers until the process ends."""
        try:
            while (reply := await _read_one(process)) is not None:
                waiter = self._waiting.get(reply.number)
                if waiter is not None and not waiter.done():
                    waiter.set_result(reply)
        finally:
            self._process = None
            for waiter in self._waiting.values():
                if not waiter.done():
                    why = f"the process of the ray pool ended, and the next call begins another; see {self._log}"
                    waiter.set_exception(TransportError(why))
            await _kill(process)


def _checked(reply: Reply) -> Reply:
    if reply.fault == "refused":
        raise Refused(f"Ray refused: {reply.why}")
    if reply.fault:
        raise TransportError(f"Ray could not be reached: {reply.why}")
    return reply


async def _read_one(process: Process) -> Reply | None:
    """None at the end, and where what comes is no reply."""
    assert process.stdout is not None, "made with a pipe"
    try:
        line = await process.stdout.readline()
        return read_reply(line) if line.endswith(b"\n") else None
    except (msgspec.DecodeError, ValueError):
        return None


async def _end(process: Process) -> None:
    """By closing its calls, and by force where that does not help."""
    assert process.stdin is not None, "made with a pipe"
    process.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        await _kill(process)


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
