"""The other ranks of a learner: what rank 0 says, done here.

Invariant: commands of a line are done in the order they come. A failure that all ranks share is rank 0's to decide
about, and the next command is waited for; any other ends this rank, and its absence the learner.

| loop    | consumes | waits for          | unblocked by      | produces                     |
|---------|----------|--------------------|-------------------|------------------------------|
| steps   | commands | the next, or a pulse | rank 0, or its end | this rank's part of a step   |
| publish | commands | the next, or a pulse | rank 0, or its end | its part of a publish        |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from echo2.errors import first_cause
from echo2.learner.commands import (
    Audit,
    End,
    Forget,
    Freeze,
    Open,
    PublishCommand,
    Save,
    Serve,
    StepCommand,
    Train,
    Wait,
)
from echo2.learning.ranks import SHARED_ERRORS, Ranks

if TYPE_CHECKING:
    from echo2.learning.frozen import FrozenState
    from echo2.learning.learner import TorchLearner

C = TypeVar("C", StepCommand, PublishCommand)


class Follower:
    def __init__(self, steps: Ranks, publishing: Ranks, open_learner: Callable[[str], TorchLearner]) -> None:
        """open_learner: run id → the learner of this rank. Blocking."""
        self._steps = steps
        self._publishing = publishing
        self._open = open_learner
        self._learner: TorchLearner | None = None
        self._frozen: dict[int, FrozenState] = {}
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Until rank 0 says that it is over. Raises what ended this rank before that."""
        try:
            async with asyncio.TaskGroup() as life:
                life.create_task(self._follow_steps(), name="steps")
                life.create_task(self._follow_publishes(), name="publishes")
        except BaseExceptionGroup as group:
            raise first_cause(group) from group

    async def _follow_steps(self) -> None:
        while True:
            command = msgspec.msgpack.decode(await _heard(self._steps), type=StepCommand)
            if isinstance(command, End):
                return
            try:
                await self._do_step(command)
            except SHARED_ERRORS:
                continue

    async def _follow_publishes(self) -> None:
        while True:
            command = msgspec.msgpack.decode(await _heard(self._publishing), type=PublishCommand)
            if isinstance(command, End):
                return
            try:
                await self._do_publish(command)
            except SHARED_ERRORS:
                continue

    async def _do_step(self, command: StepCommand) -> None:
        match command:
            case Open(run_id):
                self._learner = await asyncio.to_thread(self._open, run_id)
            case Audit(batch):
                await self._opened.audit(batch)
            case Train(batch):
                await self._opened.train_step(batch)
            case Freeze(number):
                frozen = await self._opened.freeze()
                async with self._news:
                    self._frozen[number] = frozen
                    self._news.notify_all()
            case Wait() | End():
                pass

    async def _do_publish(self, command: PublishCommand) -> None:
        match command:
            case Save(number):
                await self._opened.save_checkpoint(await self._held(number))
            case Serve(number):
                await self._opened.serve_snapshot(await self._held(number))
            case Forget(numbers):
                for number in numbers:
                    await self._held(number)
                    del self._frozen[number]
            case Wait() | End():
                pass

    async def _held(self, number: int) -> FrozenState:
        """The frozen step of this number; rank 0 may name it while it is still being copied here."""
        async with self._news:
            await self._news.wait_for(lambda: number in self._frozen)
            return self._frozen[number]

    @property
    def _opened(self) -> TorchLearner:
        assert self._learner is not None, "rank 0 has it opened first"
        return self._learner


async def _heard(ranks: Ranks) -> bytes:
    return await asyncio.to_thread(ranks.broadcast, b"")
