"""What the programs' shells share: real time, real ids, words on standard error, and an end that comes in order.

Invariant: a program started by a supervisor never outlives it: its standard input is a line to the supervisor, and when
that line closes the program ends, at the latest after ``LAST_BREATH_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TextIO, TypeVar

from echo2.errors import Starved

T = TypeVar("T")

LIFELINE_VARIABLE = "ECHO2_LIFELINE"
"""Set to 1 by the supervisor for programs whose standard input is their life line."""
LAST_BREATH_S = 10.0
"""Time to clean up after the supervisor died."""


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class RandomIds:
    def new(self, prefix: str) -> str:
        return f"{prefix}-{secrets.token_hex(16)}"


class ConsoleEvents:
    """Events as one line each, for people who look at a log."""

    def __init__(self, who: str, stream: TextIO | None = None) -> None:
        self._who = who
        self._stream = stream

    def emit(self, kind: str, **fields: Any) -> None:
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        if kind == "coordinator_unreachable":
            told = f"{fields['error']}; trying again in {fields['retry_in_s']:.1f} s"
        line = f"{time.strftime('%H:%M:%S')} {self._who}: {kind.replace('_', ' ')}{': ' if told else ''}{told}"
        print(" ".join(line.split()), file=self._stream or sys.stderr, flush=True)


async def run_program(main: Coroutine[Any, Any, T], on_stop: Callable[[str], None]) -> T:
    """Await ``main`` as a program of this process.

    The first SIGTERM or SIGINT calls ``on_stop`` with its reason. The second cancels ``main`` and raises
    KeyboardInterrupt; the end of the life line cancels it and raises Starved.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    asked: list[str] = []
    orphan = False

    def signalled(name: str) -> None:
        asked.append(name)
        if len(asked) == 1:
            on_stop(f"received {name}")
        else:
            task.cancel()

    def orphaned() -> None:
        nonlocal orphan
        orphan = True
        exit_soon()
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number.name)
    lifeline = await _watch_lifeline(orphaned)
    try:
        return await task
    except asyncio.CancelledError:
        if orphan:
            raise Starved("the supervisor of this program is gone, and the program ends with it") from None
        if len(asked) > 1:
            raise KeyboardInterrupt from None
        raise
    finally:
        if lifeline is not None:
            lifeline.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def exit_soon() -> None:
    """End this process after its last breath, whatever still runs in it."""
    timer = threading.Timer(LAST_BREATH_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


class _Lifeline(asyncio.Protocol):
    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self.ended = False

    def eof_received(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_lost()


async def _watch_lifeline(on_lost: Callable[[], None]) -> asyncio.ReadTransport | None:
    if os.environ.get(LIFELINE_VARIABLE) != "1":
        return None
    # A copy of the descriptor: closing the transport must not close standard input under other code.
    stream = os.fdopen(os.dup(0), "rb", buffering=0)
    with contextlib.suppress(ValueError):
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: _Lifeline(on_lost), stream)
        return transport
    stream.close()
    return None
