"""A relay as a process: orders come in on one pipe, words go out on another.

Invariant: the process ends with its program: when the pipe of orders ends, the relay closes and exit code 0 follows
within ``LAST_BREATH_S``, whatever its threads do. A thread that dies of an error nobody expected takes the process
with it, so a relay works or is gone; its program starts another. No thread of the relay ever waits for the program to
read.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import BinaryIO, Protocol

from echo2.broadcast.relay.channel import encode_message, read_order
from echo2.broadcast.relay.control import Alive, Event, Listening, Open, Order, Tally, Word
from echo2.errors import Echo2Error, Malformed, UserError

LAST_BREATH_S = 2.0
PULSE_S = 5.0
"""A relay says something at least so often, so that its program can tell a frozen one from a quiet one."""


class Shell(Protocol):
    """The relay itself."""

    def start(self) -> int:
        """Listen; return the port. Raises OSError."""
        ...

    def obey(self, order: Order) -> None: ...

    def close(self) -> None: ...


MakeShell = Callable[[Open, Callable[[Word], None]], Shell]


def serve(make_shell: MakeShell) -> int:
    """Be the relay of the program at the other end of standard input and output; return the exit code.

    Never returns when a thread of the relay fails: the process ends with exit code 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C reaches the program too, and it decides
    orders, words = _take_over_pipes()
    writer = WordWriter(words)
    threading.excepthook = lambda failure: _perish(failure.exc_value)
    try:
        return _obey_until_the_end(orders, writer, make_shell)
    except Echo2Error as error:
        writer.say(Event(kind="relay_failed", fields={"error": str(error)}))
        print(f"echo2: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    finally:
        _exit_soon()
        writer.close()


def _obey_until_the_end(orders: BinaryIO, writer: WordWriter, make_shell: MakeShell) -> int:
    first = read_order(orders)
    if first is None:
        return 0
    if not isinstance(first, Open):
        raise Malformed(f"a relay's first order must be to open, got {type(first).__name__}")
    shell = make_shell(first, writer.say)
    try:
        writer.say(Listening(_start(shell, first)))
        while (order := read_order(orders)) is not None:
            try:
                shell.obey(order)
            except (Echo2Error, OSError) as error:
                writer.say(Event("relay_order_failed", {"order": type(order).__name__, "error": str(error)}))
        return 0
    finally:
        _exit_soon()
        shell.close()


def _start(shell: Shell, opening: Open) -> int:
    try:
        return shell.start()
    except OSError as error:
        where = f"port {opening.port} of {opening.host}"
        raise UserError(f"the relay must listen on {where}, got: {error.strerror or error}; choose another") from None


class WordWriter:
    """Writes words from any thread, in order, in a thread of its own; a tally nobody read yet gives way to the next."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._unsaid: deque[Word] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="words", daemon=True)
        self._thread.start()

    def say(self, word: Word) -> None:
        with self._changed:
            if self._unsaid and isinstance(word, Tally) and isinstance(self._unsaid[-1], Tally):
                self._unsaid.pop()
            self._unsaid.append(word)
            self._changed.notify()

    def close(self) -> None:
        """Wait until everything was written or the program is gone."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(LAST_BREATH_S)

    def _write(self) -> None:
        while (word := self._next()) is not None:
            try:
                self._pipe.write(encode_message(word))
                self._pipe.flush()
            except OSError:
                return  # the program is gone, and the pipe of orders says so too

    def _next(self) -> Word | None:
        with self._changed:
            if not self._unsaid and not self._is_closed:
                self._changed.wait(PULSE_S)
            if self._unsaid:
                return self._unsaid.popleft()
            return None if self._is_closed else Alive()


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Orders and words; whatever else reads or writes the standard streams cannot disturb them any more."""
    orders, words = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, words


def _perish(error: BaseException | None) -> None:
    if error is not None:
        traceback.print_exception(error)
    os._exit(1)


def _exit_soon() -> None:
    timer = threading.Timer(LAST_BREATH_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
