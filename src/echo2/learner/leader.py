"""Rank 0 of a learner: does what the program asks, and has the other ranks do the same.

Invariant: a line is used by one command at a time, and what a command does is over before the next is sent. A failure
that all ranks share leaves the line in order; after any other it is not used again, and the others find rank 0 gone.

| loop           | consumes | waits for           | unblocked by     | produces                                   |
|----------------|----------|---------------------|------------------|--------------------------------------------|
| pulse (a line) | time     | a quarter time-out  | the clock, close | a ``Wait`` where the line has nothing to do |
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from echo2.broadcast.manifest import Manifest
from echo2.learner.commands import (
    Audit,
    Command,
    End,
    Forget,
    Freeze,
    Save,
    Serve,
    Train,
    Wait,
)
from echo2.learning.ranks import SHARED_ERRORS, Ranks
from echo2.ports import Frozen
from echo2.transport.messages import BatchReply, RowAudit

if TYPE_CHECKING:
    from echo2.learning.frozen import FrozenState
    from echo2.learning.learner import TorchLearner

T = TypeVar("T")

MOST_PULSE_S = 10.0


class LineOfCommand:
    """From rank 0 to the others, over one group."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._pulse_s = min(MOST_PULSE_S, timeout_s / 4)
        self._busy = asyncio.Lock()
        self._closing = asyncio.Event()
        self._in_order = True

    async def tell(self, command: Command, work: Callable[[], Awaitable[T]]) -> T:
        """Send the command and do this rank's part of it."""
        async with self._busy:
            if not self._in_order:
                raise RuntimeError("a command was broken off: the ranks must start again")
            self._in_order = False
            await asyncio.to_thread(self._ranks.broadcast, msgspec.msgpack.encode(command))
            try:
                done = await work()
            except SHARED_ERRORS:
                self._in_order = True
                raise
            self._in_order = True
            return done

    async def pulse(self, idle: Callable[[], Command] = Wait) -> None:
        """Until ``close``: say that there is nothing to do, as often as the others need to hear it."""
        while not self._closing.is_set():
            if not self._busy.locked():
                await self.tell(idle(), _nothing)
            try:
                async with asyncio.timeout(self._pulse_s):
                    await self._closing.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Let the others leave, unless a command was broken off: then they find out by themselves."""
        self._closing.set()
        if self._in_order and not self._busy.locked():
            await self.tell(End(), _nothing)


async def _nothing() -> None: ...


@dataclass(eq=False)
class FrozenSteps:
    """Implements ``ports.Frozen``: this rank's copy, and the number under which every rank keeps its own."""

    number: int
    own: FrozenState

    @property
    def step(self) -> int:
        return self.own.step


class LeadingLearner:
    """Implements ``ports.Learner``."""

    def __init__(self, own: TorchLearner, steps: LineOfCommand, publishing: LineOfCommand) -> None:
        self._own = own
        self._steps = steps
        self._publishing = publishing
        self._numbers = itertools.count()
        self._over: list[int] = []

    @property
    def step(self) -> int:
        return self._own.step

    @property
    def last_batch_digest(self) -> str:
        return self._own.last_batch_digest

    @property
    def initial_weights_hash(self) -> str:
        return self._own.initial_weights_hash

    def idle(self) -> Command:
        """For the publish line: nothing to do, except to forget what is over."""
        over, self._over = self._over, []
        return Forget(tuple(over)) if over else Wait()

    async def audit(self, batch: BatchReply) -> tuple[RowAudit, ...]:
        return await self._steps.tell(Audit(batch), lambda: self._own.audit(batch))

    async def train_step(self, batch: BatchReply) -> Mapping[str, float]:
        return await self._steps.tell(Train(batch), lambda: self._own.train_step(batch))

    async def freeze(self) -> FrozenSteps:
        number = next(self._numbers)
        frozen = FrozenSteps(number, await self._steps.tell(Freeze(number), self._own.freeze))
        weakref.finalize(frozen, self._over.append, number)
        return frozen

    async def save_checkpoint(self, frozen: Frozen | None = None) -> None:
        held = await self._held(frozen)
        await self._publishing.tell(Save(held.number), lambda: self._own.save_checkpoint(held.own))

    async def write_snapshot(self, incarnation: int, frozen: Frozen | None = None) -> tuple[Manifest, Path]:
        held = await self._held(frozen)
        return await self._publishing.tell(Serve(held.number), lambda: self._own.write_snapshot(incarnation, held.own))

    async def discard_snapshots(self, keep: int) -> None:
        await self._own.discard_snapshots(keep)

    async def _held(self, frozen: Frozen | None) -> FrozenSteps:
        held = await self.freeze() if frozen is None else frozen
        if not isinstance(held, FrozenSteps):
            raise TypeError(f"frozen must come from freeze(), got {type(held).__name__}")
        return held
