"""An event loop whose clock jumps.

Invariant (I10): what runs on this loop depends on nothing but its arguments. Time passes only when nothing is ready,
and then it jumps to the next timer; threads, sockets, subprocesses and signals are refused; tasks hash by their number,
so sets of tasks are walked in the same order in every run.

A wait that nothing can end is a ``Deadlock`` that names every waiting task and the line it waits on (I7). A run that
goes on past ``until_s``, or that spins without time passing, is reported the same way.

Timers lie in a heap of (time, order of making): those of the same moment fire in the order in which they were set.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import linecache
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from echo2.errors import Starved

T = TypeVar("T")

TICK_S = 1e-6
"""Timers closer than this fire together; far above the rounding of a float that holds years."""
SPIN_LIMIT = 200_000
"""Loop turns without time passing that count as a livelock; honest bursts of callbacks stay far below."""
WIND_UP_S = 3600.0
"""Virtual time that cancelled tasks get to clean up after the main one ended."""
LEAST_SWEPT = 1000
"""Cancelled timers below which sweeping is not worth it."""
GC_THRESHOLD = 1_000_000
"""Objects made between two looks for garbage: a world of ten thousand workers is walked whole at each look."""
_ASYNCIO_DIR = str(Path(asyncio.__file__).parent)


class Deadlock(Starved):
    """The simulated run cannot go on, or does not come to an end."""


class Overdue(Deadlock):
    """It goes on past the virtual time that it was given."""


class _CountedTask(asyncio.Task[Any]):
    """A task whose hash is its number: ``set`` order, and so cancellation order, repeats between runs."""

    def __init__(self, coro: Any, number: int, loop: asyncio.AbstractEventLoop, context: Context | None) -> None:
        self.number = number  # first: a task is put into a set while it is made
        super().__init__(coro, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number


class _Call:
    """What asyncio's own handles are to their callers, without their debugging: millions are made."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self.callback, self.args = callback, args
        self.context = copy_context() if context is None else context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class _Timer(_Call):
    __slots__ = ("_at_s", "_loop")

    def __init__(
        self,
        at_s: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        loop: VirtualLoop,
    ) -> None:
        super().__init__(callback, args, context)
        self._at_s, self._loop = at_s, loop

    def when(self) -> float:
        return self._at_s

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self._loop.note_cancelled()


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, until_s: float) -> None:
        super().__init__()
        self._now_s = 0.0
        self.until_s = until_s
        self._turns_without_time = 0
        self._tasks_made = 0
        self._timers: list[tuple[float, int, _Timer]] = []
        self._timers_made = 0
        self._cancelled = 0
        """Timers in the heap that were cancelled, about."""
        self.callbacks = 0
        """Run so far: the loop's events."""
        self.faults: list[str] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_fault)

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Timer:
        timer = _Timer(when, callback, args, context, self)
        self._timers_made += 1
        heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Timer:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Call:
        call = _Call(callback, args, context)
        self._ready.append(call)  # type: ignore[attr-defined]
        return call

    def note_cancelled(self) -> None:
        """Most time-outs never fire; they are swept when they are most of the heap."""
        self._cancelled += 1
        if self._cancelled > LEAST_SWEPT and 2 * self._cancelled > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2].is_cancelled]
            heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        """One turn: what is ready, or else what the next moment brings."""
        ready = self._ready  # type: ignore[attr-defined]
        if ready:
            self._count_turn()
        else:
            self._pass_time()
        timers, soon_s = self._timers, self._now_s + TICK_S
        while timers and timers[0][0] < soon_s:
            timer = heappop(timers)[2]
            if not timer.is_cancelled:
                ready.append(timer)
        turn = len(ready)
        self.callbacks += turn
        for _ in range(turn):
            call = ready.popleft()
            if not call.is_cancelled:
                try:
                    call.context.run(call.callback, *call.args)
                except Exception as error:
                    self._note_fault(self, {"message": f"{call.callback!r} failed", "exception": error})

    def _count_turn(self) -> None:
        self._turns_without_time += 1
        if self._turns_without_time > SPIN_LIMIT:
            raise Deadlock(
                f"{SPIN_LIMIT} turns passed at {self._now_s:.3f} s without time going on; "
                f"a loop must wait for something\n{describe_tasks(self)}"
            )

    def _pass_time(self) -> None:
        """Jump to the next timer that will fire."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heappop(timers)
            self._cancelled -= 1
        if not timers:
            raise Deadlock(
                f"nothing can happen any more at {self._now_s:.3f} s: no task is ready and no timer runs"
                f"\n{describe_tasks(self)}"
            )
        if timers[0][0] > self.until_s:
            raise Overdue(f"the run had to end by {self.until_s:g} s and still waits\n{describe_tasks(self)}")
        self._turns_without_time = 0
        self._now_s = max(self._now_s, timers[0][0])

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._tasks_made += 1
        return _CountedTask(coro, self._tasks_made, loop, context)

    def _note_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context.get('message', 'fault')}: {context.get('exception')!r}")

    def _write_to_self(self) -> None:
        pass

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "virtual time has no threads, sockets, processes or signals: code that runs in simulation must reach "
            "them through a port (Transport, Store, Spool, Engine, Learner)"
        )

    call_soon_threadsafe = _refuse  # type: ignore[assignment]
    run_in_executor = _refuse  # type: ignore[assignment]
    getaddrinfo = _refuse
    create_connection = _refuse
    create_server = _refuse
    create_datagram_endpoint = _refuse
    subprocess_exec = _refuse
    subprocess_shell = _refuse
    add_reader = _refuse  # type: ignore[assignment]
    add_writer = _refuse  # type: ignore[assignment]
    add_signal_handler = _refuse  # type: ignore[assignment]


def run_virtual(main: Coroutine[Any, Any, T], *, until_s: float = 30 * 24 * 3600.0) -> T:
    """Run ``main`` to its end in virtual time and return its result.

    Raises Deadlock when it cannot end or has not ended by ``until_s`` virtual seconds; whatever ``main`` raises
    otherwise; RuntimeError when a callback failed where nobody could see it.
    """
    loop = VirtualLoop(until_s)
    try:
        with _rare_collections():
            result = loop.run_until_complete(main)
        if loop.faults:
            raise RuntimeError("a callback or task failed unseen: " + "; ".join(loop.faults))
        return result
    finally:
        _wind_up(loop)
        main.close()
        loop.close()


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Whatever the collector does or leaves changes no run; looking often costs half of a large one."""
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _wind_up(loop: VirtualLoop) -> None:
    """Cancel what is left, in order of creation, and let it clean up."""
    for task in _live_tasks(loop):
        task.cancel()
    loop.until_s = loop.time() + WIND_UP_S
    while left := _live_tasks(loop):
        try:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        except Deadlock:
            return  # the first error is the one worth telling
        except KeyboardInterrupt:
            pass  # a task group hands on the one that ended the run, and leaves the loop in the middle of the others


def _live_tasks(loop: VirtualLoop) -> list[_CountedTask]:
    tasks = [task for task in asyncio.all_tasks(loop) if isinstance(task, _CountedTask)]
    return sorted(tasks, key=lambda task: task.number)


def describe_tasks(loop: VirtualLoop) -> str:
    """One line per waiting task: its name and the innermost line of ours that it waits on."""
    return "\n".join(f"  {task.get_name()} waits {_waits_on(task)}" for task in _live_tasks(loop))


def _waits_on(task: asyncio.Task[Any]) -> str:
    frame: FrameType | None = None
    awaited: Any = task.get_coro()
    while awaited is not None:
        here = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if here is not None and not here.f_code.co_filename.startswith(_ASYNCIO_DIR):
            frame = here
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    if frame is None:
        return "for an unknown thing"
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"in {code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno}) on: {line}"
