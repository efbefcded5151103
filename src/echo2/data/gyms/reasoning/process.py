"""The process that holds reasoning-gym: it loads the library once, and forks a lane that does what is asked.

Invariant: every request is answered once, by the lane or by how the lane ended. Processor time is limited by a timer of
the kernel whose signal kills the lane without asking Python, memory by the address space it may have; it can write no
file. A lane that is killed is replaced by a fork, which costs milliseconds.

    python -m echo2.data.gyms.reasoning.process     requests on standard input, answers on standard output, in turn
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
from pathlib import Path
from typing import NoReturn

import msgspec

from echo2.data.frames import Inbox, packed
from echo2.data.gyms.reasoning import problems
from echo2.data.gyms.reasoning.messages import Ask, Done, Ended, Failed, Judge, Told, asks

JUDGE_S = 5.0
MAKE_S = 120.0
"""Processor seconds. A typical score takes a thousandth of a second; the slowest problems take about one."""
MEMORY_BYTES = 2**30
"""Beyond what the lane has when it starts."""
RETIRE_AFTER = 2000
"""Requests; what the library caches goes with the lane."""
_READ_BYTES = 65536
_CLOSED, _RETIRED = 0, 3


def main() -> None:
    told_fd = os.dup(1)
    os.dup2(2, 1)  # what anything prints does not disturb the answers
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    problems.install()
    with contextlib.suppress(BrokenPipeError):
        while True:
            pid = os.fork()
            if pid == 0:
                _lane(told_fd)
            status = os.waitpid(pid, 0)[1]
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _CLOSED:
                return
            if not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == _RETIRED):
                by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                _tell(told_fd, Ended("time" if by == signal.SIGPROF else "lost"))


def _lane(told_fd: int) -> NoReturn:
    code = 1
    try:
        _limit()
        code = _serve(told_fd)
    finally:
        os._exit(code)  # nothing of the parent's is to be flushed, closed or unwound


def _limit() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # where the system does not tell, the limit of time holds all the same
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(told_fd: int) -> int:
    inbox = Inbox(asks)
    for _ in range(RETIRE_AFTER):
        waiting: list[Ask] = []
        while not waiting:
            data = os.read(0, _READ_BYTES)
            if not data:
                return _CLOSED
            waiting = inbox.feed(data)
        told = _answered(waiting[0])
        _tell(told_fd, told)
        if isinstance(told, Ended):
            break
    return _RETIRED


def _answered(ask: Ask) -> Told:
    signal.setitimer(signal.ITIMER_PROF, JUDGE_S if isinstance(ask, Judge) else MAKE_S)
    try:
        return Done(problems.answer(ask))
    except MemoryError:
        return Ended("memory")
    except Exception as error:
        return Failed(" ".join(f"{type(error).__name__}: {error}".split())[:400])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _tell(told_fd: int, told: Told) -> None:
    try:
        view = packed(told)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        view = packed(Failed(f"its answer cannot be sent: {error}"))
    while view:
        view = view[os.write(told_fd, view) :]


if __name__ == "__main__":
    main()
