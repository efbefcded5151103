"""One rank's life in a learner of several.

Invariant: only rank 0 speaks to the coordinator. A rank that loses another ends with a sentence and exit code 1, and
whoever launched the ranks starts all of them again from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.config.root import Config
from echo2.errors import ConfigError, Starved, first_cause
from echo2.learner.agreement import agree
from echo2.learner.commands import Command, Open, Wait
from echo2.learner.follower import Follower
from echo2.learner.leader import LeadingLearner, LineOfCommand
from echo2.ports import EventLog
from echo2.run.folder import RunFolder
from echo2.shell import exit_soon
from echo2.transport.messages import AssetFile

if TYPE_CHECKING:
    from echo2.learning.learner import TorchLearner
    from echo2.learning.torch_ranks import Group

Opened = tuple["TorchLearner", dict[AssetFile, Path]]
OpenRank = Callable[[str, "Group"], Opened]
"""Run id → this rank's learner, and the files beside its weights. Blocking."""
OpenLeader = Callable[[str], Awaitable[tuple[LeadingLearner, dict[AssetFile, Path]]]]


Prepare = Callable[[], object]
"""Makes the model's directory where there is none. Blocking; before the ranks meet, because once they have,
transformers saves only what rank 0 makes."""


async def lead(
    config: Config,
    folder: RunFolder,
    prepare: Prepare,
    open_rank: OpenRank,
    live: Callable[[OpenLeader], Awaitable[None]],
) -> None:
    """Rank 0: ``live`` is the program's life, given what opens its learner."""
    async with _group(config, folder, prepare) as group:
        timeout_s = config.learning.collective_timeout_s
        steps, publishing = LineOfCommand(group.steps, timeout_s), LineOfCommand(group.publishing, timeout_s)
        leading: list[LeadingLearner] = []

        async def open_all(run_id: str) -> tuple[LeadingLearner, dict[AssetFile, Path]]:
            own, assets = await steps.tell(Open(run_id), lambda: asyncio.to_thread(open_rank, run_id, group))
            leading.append(LeadingLearner(own, steps, publishing))
            return leading[0], assets

        def idle() -> Command:
            return leading[0].idle() if leading else Wait()

        async with asyncio.TaskGroup() as life:
            life.create_task(steps.pulse(), name="pulse of steps")
            life.create_task(publishing.pulse(idle), name="pulse of publishes")
            try:
                await live(open_all)
            finally:
                await steps.close()
                await publishing.close()


async def follow(config: Config, folder: RunFolder, prepare: Prepare, open_rank: OpenRank, events: EventLog) -> None:
    """Any other rank."""
    async with _group(config, folder, prepare) as group:
        events.emit("following", rank=group.steps.rank, ranks=group.steps.world, device=group.device)
        await Follower(group.steps, group.publishing, lambda run_id: open_rank(run_id, group)[0]).run()


@asynccontextmanager
async def _group(config: Config, folder: RunFolder, prepare: Prepare) -> AsyncIterator[Group]:
    if config.learning.learner == "scripted":
        raise ConfigError('learning.learner = "scripted" computes nothing that ranks could share; start one learner')
    from echo2.learning.torch_ranks import first_line, join_group, leave_group, lost_peer

    await asyncio.to_thread(prepare)
    try:
        group = await asyncio.to_thread(join_group, config.learning.device, config.learning.collective_timeout_s)
        await asyncio.to_thread(agree, group.steps, config, folder.learner)
        yield group
        await asyncio.to_thread(leave_group)
    except BaseException as error:
        exit_soon()  # a thread may still wait inside a collective, until its time-out
        cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
        if lost_peer(cause):
            raise Starved(f"this rank lost another rank of its learner: {first_line(cause)}") from error
        if cause is error:
            raise
        raise cause from error
