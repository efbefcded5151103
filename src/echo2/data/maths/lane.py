"""The process that compares expressions: one at a time, under limits, until it is killed or retires.

Invariant: whatever a reply makes it do ends. Processor time is limited by a timer of the kernel whose signal kills the
process without asking Python, memory by the address space it may have; it can start no program and write no file.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from echo2.data.maths.frames import Ask, Inbox, Outcome, Reached, Stage, Told, packed

GOLD_S = 4.0
PARSE_S = 1.0
COMPARE_S = 2.0
"""Processor seconds, so that a busy machine changes no score. A typical comparison takes a hundredth of that."""
MEMORY_BYTES = 512 * 2**20
"""Beyond what the process has when it starts."""
RETIRE_AFTER = 1000
"""Comparisons; what sympy caches goes with the process."""
_READ_BYTES = 65536
_DESCRIPTORS = 4096


def serve(line: socket.socket) -> NoReturn:
    """Answer what comes over ``line``. Called in a process of its own, which ends here."""
    code = 1
    try:
        _leave(line)
        _limit()
        _answer_all(line)
        code = 0
    finally:
        os._exit(code)  # nothing of the parent's is to be flushed, closed or unwound


def _leave(line: socket.socket) -> None:
    """Close what else the parent had open: its end would not be noticed while this process held a copy."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.closerange(3, line.fileno())
    os.closerange(line.fileno() + 1, _DESCRIPTORS)


def _limit() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    size = _address_space_bytes()
    if size is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    longest_s = int((GOLD_S + PARSE_S + COMPARE_S) * RETIRE_AFTER)
    resource.setrlimit(resource.RLIMIT_CPU, (longest_s, longest_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _address_space_bytes() -> int | None:
    """None where the system does not tell; the limits of time hold all the same."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _answer_all(line: socket.socket) -> None:
    inbox = Inbox()
    answered, last = 0, False
    while not last:
        data = line.recv(_READ_BYTES)
        if not data:
            return
        for ask in inbox.feed(data):
            if isinstance(ask, Ask):
                outcome, healthy = _outcome(ask, lambda stage: line.sendall(packed(Reached(stage))))
                answered += 1
                last = not healthy or answered == RETIRE_AFTER
                line.sendall(packed(Told(ask.number, outcome, last)))


def _outcome(ask: Ask, reach: Callable[[Stage], None]) -> tuple[Outcome, bool]:
    """(outcome, whether the process may go on)"""
    from echo2.data.maths import algebra

    stage: Stage = "gold"
    try:
        _allow(GOLD_S)
        gold = algebra.gold_expression(ask.gold)
        if gold is None:
            return "gold_unreadable", True
        stage = "answer"
        reach(stage)
        _allow(PARSE_S)
        answer = algebra.expression(ask.answer)
        if answer is None:
            return "unreadable", True
        stage = "compare"
        reach(stage)
        _allow(COMPARE_S)
        return ("equal" if algebra.equal(gold, answer) else "different"), True
    except MemoryError:
        return ("gold_too_costly" if stage == "gold" else "too_costly"), False
    except Exception:
        return ("gold_unreadable" if stage == "gold" else "unreadable"), True
    finally:
        _allow(0)


def _allow(seconds: float) -> None:
    """From now on, so much processor time; 0 stops the timer."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
