"""Transfers as fluid flows that share pipes fairly.

Invariant: rates are max-min fair: no flow could have more without taking it from one that has no more than it. A change
is carried as far as full pipes carry it and no farther, so flows that share nothing cost one another nothing.

A flow runs to a goal of so many bytes, is asked for its next one, and ends when it has none; as long as it goes on, no
other flow's rate changes. Where hundreds of flows fill one pipe their rates are settled together, at most once in
``CROWD_SETTLE_S``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

FULL = 1 - 1e-9
"""Share of its capacity at which a pipe is full."""
SAME = 1e-9
"""Relative difference below which a rate is as it was."""
CROWD = 64
"""Flows that are settled at once, whenever one of them begins or ends."""
CROWD_SETTLE_S = 0.02
"""How long more of them wait: a millisecond's work for each of them at each change would make stars impossible."""


class Pipe:
    """One direction of somebody's line."""

    __slots__ = ("capacity", "carried_bytes", "flows", "used")

    def __init__(self, bytes_per_s: float) -> None:
        self.capacity = bytes_per_s
        self.flows: dict[Flow, None] = {}
        self.used = 0.0
        self.carried_bytes = 0.0

    @property
    def is_full(self) -> bool:
        return self.used >= FULL * self.capacity


class Flow:
    """Bytes on their way through ``pipes``; made by ``Flows.open``."""

    __slots__ = ("_since_s", "_timer", "goal", "left", "on_goal", "pipes", "rate")

    def __init__(self, pipes: tuple[Pipe, ...], nbytes: float, on_goal: Callable[[], float | None]) -> None:
        self.pipes = pipes
        self.goal = nbytes
        self.left = nbytes
        """Of the goal, when ``rate`` last changed."""
        self.on_goal = on_goal
        """Called when the goal is reached; gives the next one, or None for the end."""
        self.rate = 0.0
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def done(self, now_s: float) -> float:
        """Bytes of the goal that are there."""
        return min(self.goal, self.goal - self.left + self.rate * (now_s - self._since_s))


class Flows:
    """All flows of a world."""

    def __init__(self) -> None:
        self._crowded: dict[Pipe, None] = {}
        """Pipes whose flows wait to be settled."""
        self.settled = 0
        """Rates worked out so far, for benches."""

    def open(self, pipes: tuple[Pipe, ...], nbytes: float, on_goal: Callable[[], float | None]) -> Flow:
        flow = Flow(pipes, max(nbytes, 1.0), on_goal)
        flow._since_s = asyncio.get_running_loop().time()
        for pipe in pipes:
            pipe.flows[flow] = None
        self._changed(pipes)
        return flow

    def close(self, flow: Flow) -> None:
        """It ends here, at its goal or not. Closing twice changes nothing."""
        if flow not in flow.pipes[0].flows:
            return
        self._count(flow)
        self._set_rate(flow, 0.0)
        for pipe in flow.pipes:
            del pipe.flows[flow]
            if not pipe.flows:
                pipe.used = 0.0
        self._changed(flow.pipes)

    # ---- goals -------------------------------------------------------------------------------------------------

    def _reached(self, flow: Flow) -> None:
        flow._timer = None
        now_s = asyncio.get_running_loop().time()
        self._count(flow)
        flow.left, flow._since_s = 0.0, now_s
        following = flow.on_goal()
        if following is None:
            flow.goal = 0.0
            self.close(flow)
            return
        flow.goal = flow.left = max(following, 1.0)
        self._set_timer(flow)

    def _count(self, flow: Flow) -> None:
        done = flow.done(asyncio.get_running_loop().time())
        for pipe in flow.pipes:
            pipe.carried_bytes += done

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if abs(rate - flow.rate) <= SAME * rate:
            return
        now_s = asyncio.get_running_loop().time()
        flow.left = max(0.0, flow.left - flow.rate * (now_s - flow._since_s))
        flow._since_s = now_s
        for pipe in flow.pipes:
            pipe.used += rate - flow.rate
        flow.rate = rate
        self._set_timer(flow)

    def _set_timer(self, flow: Flow) -> None:
        if flow._timer is not None:
            flow._timer.cancel()
            flow._timer = None
        if flow.rate > 0:
            due_s = flow._since_s + flow.left / flow.rate
            flow._timer = asyncio.get_running_loop().call_at(due_s, self._reached, flow)

    # ---- rates -------------------------------------------------------------------------------------------------

    def _changed(self, pipes: tuple[Pipe, ...]) -> None:
        reached = _reached_from(pipes)
        if sum(len(pipe.flows) for pipe in reached) <= CROWD:
            self._settle(reached)
            return
        if not self._crowded:
            asyncio.get_running_loop().call_later(CROWD_SETTLE_S, self._settle_crowd)
        self._crowded.update(dict.fromkeys(pipes))

    def _settle_crowd(self) -> None:
        pipes, self._crowded = self._crowded, {}
        self._settle(_reached_from(pipes))

    def _settle(self, pipes: dict[Pipe, None]) -> None:
        """Share these pipes anew, and those that turn out to be full."""
        while True:
            flows = dict.fromkeys(flow for pipe in pipes for flow in pipe.flows)
            self.settled += len(flows)
            for flow, rate in _fair_rates(flows).items():
                self._set_rate(flow, rate)
            others = dict.fromkeys(pipe for flow in flows for pipe in flow.pipes if pipe not in pipes and pipe.is_full)
            more = {pipe: None for pipe in others if any(flow not in flows for flow in pipe.flows)}
            if not more:
                return
            pipes = _reached_from([*pipes, *more])


def _reached_from(pipes: Iterable[Pipe]) -> dict[Pipe, None]:
    """The pipes, and all full ones to which their flows lead."""
    found = dict.fromkeys(pipes)
    waiting = list(found)
    while waiting:
        for flow in waiting.pop().flows:
            for pipe in flow.pipes:
                if pipe not in found and pipe.is_full:
                    found[pipe] = None
                    waiting.append(pipe)
    return found


def _fair_rates(flows: dict[Flow, None]) -> dict[Flow, float]:
    """Max-min fair rates of these flows in what the others leave of their pipes."""
    spare: dict[Pipe, float] = {}
    among: dict[Pipe, int] = {}
    for flow in flows:
        for pipe in flow.pipes:
            if pipe not in spare:
                spare[pipe], among[pipe] = pipe.capacity - pipe.used, 0
            spare[pipe] += flow.rate
            among[pipe] += 1
    order = [(max(spare[pipe], 0.0) / among[pipe], number, pipe) for number, pipe in enumerate(spare)]
    heapify(order)
    rates: dict[Flow, float] = {}
    while order:
        share, number, pipe = heappop(order)
        if not among[pipe]:
            continue
        now = max(spare[pipe], 0.0) / among[pipe]
        if now > share * (1 + SAME):
            heappush(order, (now, number, pipe))
            continue
        for flow in pipe.flows:
            if flow in flows and flow not in rates:
                rates[flow] = share
                for other in flow.pipes:
                    spare[other] -= share
                    among[other] -= 1
    return rates
