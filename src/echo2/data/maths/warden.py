"""The grader process: loads math-verify once, and keeps lanes that compare.

Invariant: every request is answered once, and no reply can hold this process up: it parses nothing itself. A lane that
is killed by its limits is replaced by a fork, which has math-verify loaded already, so a hostile reply costs the others
milliseconds, not a start of Python.

    python -m echo2.data.maths.warden LANES     requests on standard input, outcomes on standard output
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque

from echo2.data.maths import lane as lane_process
from echo2.data.maths.frames import Ask, Broken, Inbox, Outcome, Reached, Stage, Told, packed

LATE_S = 60.0
"""Real time after which a lane is given up without a judgement: its limits are of processor time."""
WARM_UP = (
    (r"\frac{\sqrt{2}}{2}+\pi", r"\frac{1}{\sqrt{2}}+\pi"), (r"x^{2}-3x+1", r"1-3x+x^2"), ("x<3", r"(-\infty,3)"),
    (r"(1,2)\cup[3,\infty)", r"(1,2)"), (r"\{1,2\}", "1, 3"), (r"2^{n-1}", r"\frac{2^n}{2}"), ("y=1", "1"),
)  # fmt: skip
"""Texts of many kinds: what sympy and the grammar load and cache for them, every lane is forked with."""
_READ_BYTES = 65536


class Lane:
    """One comparing process and what it is at."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            lane_process.serve(theirs)
        theirs.close()
        self.line = ours
        self.inbox = Inbox()
        self.ask: Ask | None = None
        self.stage: Stage = "gold"
        self.due_s = 0.0
        self.gold = ""

    def put(self, ask: Ask) -> None:
        self.ask, self.stage, self.gold, self.due_s = ask, "gold", ask.gold, time.monotonic() + LATE_S
        self.line.sendall(packed(ask))

    def bury(self) -> Outcome:
        """End the process; what its end says of the request it had."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        self.line.close()
        by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if by == signal.SIGKILL:
            return "lost"
        return "gold_too_costly" if self.stage == "gold" else "too_costly"


class Warden:
    def __init__(self, most: int, asked_fd: int, told_fd: int) -> None:
        self._most, self._asked_fd, self._told_fd = most, asked_fd, told_fd
        self._inbox = Inbox()
        self._waiting: deque[Ask] = deque()
        self._lanes: list[Lane] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the other side closes."""
        self._selector.register(self._asked_fd, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(self._patience_s()):
                    if isinstance(key.data, Lane):
                        self._hear(key.data)
                    elif not self._take():
                        return
                for lane in [lane for lane in self._lanes if lane.ask and time.monotonic() > lane.due_s]:
                    self._replace(lane)
                self._hand_out()
        finally:
            for lane in self._lanes:
                lane.bury()

    def _patience_s(self) -> float | None:
        due = [lane.due_s for lane in self._lanes if lane.ask]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _take(self) -> bool:
        data = os.read(self._asked_fd, _READ_BYTES)
        self._waiting += (frame for frame in self._inbox.feed(data) if isinstance(frame, Ask))
        return bool(data)

    def _hand_out(self) -> None:
        while self._waiting:
            idle = [lane for lane in self._lanes if lane.ask is None]
            if not idle and len(self._lanes) >= self._most:
                return
            ask = self._waiting.popleft()
            # A lane that has read this gold already, else any, else a new one.
            lane = min(idle, key=lambda lane: lane.gold != ask.gold) if idle else self._open()
            try:
                lane.put(ask)
            except OSError:  # it was killed from outside while it had nothing to do
                lane.ask = None
                self._close(lane)
                self._waiting.appendleft(ask)

    def _open(self) -> Lane:
        lane = Lane()
        self._lanes.append(lane)
        self._selector.register(lane.line, selectors.EVENT_READ, lane)
        return lane

    def _hear(self, lane: Lane) -> None:
        try:
            data = lane.line.recv(_READ_BYTES)
            frames = lane.inbox.feed(data)
        except (OSError, ValueError):
            data, frames = b"", []
        for frame in frames:
            if isinstance(frame, Reached):
                lane.stage = frame.stage
            elif isinstance(frame, Told):
                lane.ask = None
                self._tell(frame)
                if frame.last:
                    self._close(lane)
                    return
        if not data:
            self._replace(lane)

    def _replace(self, lane: Lane) -> None:
        """Take a lane away that ended or is late; its request is answered by how it ended."""
        ask, outcome = lane.ask, self._close(lane)
        if ask is not None:
            self._tell(Told(ask.number, outcome))

    def _close(self, lane: Lane) -> Outcome:
        self._selector.unregister(lane.line)
        self._lanes.remove(lane)
        return lane.bury()

    def _tell(self, told: Told) -> None:
        view = packed(told)
        while view:
            view = view[os.write(self._told_fd, view) :]


def main() -> None:
    told_fd = os.dup(1)
    os.dup2(2, 1)  # what anything prints does not disturb the outcomes
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from echo2.data.maths import algebra
    except ImportError as error:
        os.write(told_fd, packed(Broken(str(error))))
        return
    for gold, answer in WARM_UP:
        algebra.equal(algebra.expression(gold), algebra.expression(answer))
    try:
        Warden(int(sys.argv[1]), 0, told_fd).run()
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
