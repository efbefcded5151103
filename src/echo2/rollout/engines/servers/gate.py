"""Who may ask the server for tokens while its weights are switched.

Invariant: between ``closing`` and its end no request is under way that began before it, whichever mode was chosen: a
switch never meets a running request, so what a request returns was sampled by one policy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from echo2.errors import EngineError
from echo2.rollout.engine import ActivationMode
from echo2.transport.patience import Recall

T = TypeVar("T")

HALT_AGAIN_S = 0.2


class Pass:
    """A request's leave to run; worthless after an abort."""

    def __init__(self, recall: Recall) -> None:
        self._recall = recall

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises EngineError, beginning with "aborted", when a switch aborts it."""
        done: list[T] = []

        async def kept() -> None:
            done.append(await work)

        await self._recall.within(None, "a reply", kept())
        if not done:
            work.close()
            raise EngineError("aborted: another policy was activated")
        return done[0]


class Gate:
    def __init__(self) -> None:
        self._open = True
        self._running = 0
        self._changed = asyncio.Condition()
        self._recall = Recall()
        self._switching = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._open

    @asynccontextmanager
    async def entered(self, *, begun: bool) -> AsyncIterator[Pass]:
        """Waits while the gate is closed.

        begun: the row has tokens already, so an abort meanwhile ends it; else it begins under the new policy.
        """
        recall = self._recall
        async with self._changed:
            await self._changed.wait_for(lambda: self._open)
            if begun and recall.called:
                raise EngineError("aborted: another policy was activated")
            self._running += 1
            mine = Pass(self._recall)
        try:
            yield mine
        finally:
            self._running -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def closing(self, mode: ActivationMode, halt: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """One switch at a time. halt: makes the server give back what it has of every running reply (``continue``)."""
        async with self._switching:
            self._open = False
            try:
                if mode is ActivationMode.ABORT:
                    self._recall.call()
                    self._recall = Recall()
                while mode is ActivationMode.CONTINUE and self._running:
                    await halt()  # again, for requests that were still on their way to the server
                    await self._emptied(HALT_AGAIN_S)
                await self._emptied(None)
                yield
            finally:
                self._open = True
                async with self._changed:
                    self._changed.notify_all()

    async def _emptied(self, limit_s: float | None) -> None:
        """Until nothing runs, or ``limit_s`` passed. Every request has a deadline of its own."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: not self._running)
