"""The learner as a process: real ports around ``LearnerProgram``.

Invariant: a learner that starts goes on from its newest whole checkpoint; only a folder without one begins at version
0, and then makes it (warm start included) before anything is announced.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3

from echo2.broadcast.changes import Changes, FindChanges, encode_changes
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import StreamedTensor, write_snapshot
from echo2.config.root import Config
from echo2.errors import Fenced, IntegrityError, UserError, first_cause
from echo2.learner import group_life
from echo2.learner.adapters import BASE_FOLDER, AdapterSnapshots
from echo2.learner.gold import gold_batches
from echo2.learner.launcher import RankProcesses
from echo2.learner.own_worker import OwnWorker
from echo2.learner.packer import DiskPacker
from echo2.learner.program import KEPT_SNAPSHOTS, LearnerOptions, LearnerProgram, Resident
from echo2.learner.scripted import ScriptedLearner
from echo2.ports import EventLog, Learner
from echo2.run.folder import RunFolder
from echo2.shell import ConsoleEvents, SystemClock, run_program
from echo2.transport.client import HttpTransport
from echo2.transport.enrolment import enrol_patiently
from echo2.transport.join import read_join
from echo2.transport.messages import AssetFile
from echo2.transport.patience import Recall
from echo2.types import Policy

if TYPE_CHECKING:
    from echo2.learning.learner import TorchLearner
    from echo2.learning.torch_ranks import Group

MOST_SNAPSHOTS = 5
"""Every version of a batch while S < 4 kappa, and no disk full of older ones at a larger S."""


class OpenedLearner(Learner, Protocol):
    @property
    def initial_weights_hash(self) -> str: ...


OpenLearner = Callable[[str], Awaitable[tuple[OpenedLearner, Mapping[AssetFile, Path]]]]
"""Run id → the learner, and the files beside its weights."""


async def run_learner(root: Path, join: str | None) -> int:
    """Train the run in folder ``root`` until it ends or a newer learner takes over; the exit code.

    One process, the launcher of ``learning.ranks`` of them, or one of those, as the environment says.
    Raises UserError, Refused when folder and coordinator do not belong together, Starved when the coordinator fell
    silent.
    """
    folder = RunFolder(root)
    config = folder.load()
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "-1"), ("WORLD_SIZE", "1")))
    if config.workers.shared_device and world > 1:
        raise UserError(
            f"workers.shared_device needs one learner process, and torchrun started {world}; set it to false"
        )
    if rank > 0:
        events = ConsoleEvents(f"learner rank {rank}")
        prepare, opened = partial(_resolve, config, folder.root), partial(_open_torch, config, folder.root)
        # Told to stop, it goes on until rank 0, which was told too, says that it is over.
        await run_program(group_life.follow(config, folder, prepare, opened, events), lambda _: None)
        return 0
    if rank < 0 and config.learning.ranks > 1:
        command = (sys.executable, "-m", "echo2", "learner", str(root), *(("--join", join) if join else ()))
        ranks = RankProcesses(command, config.learning.ranks, config.learning.threads)
        return await run_program(ranks.run(), ranks.stop)
    life = LearnerLife(folder, config, join)
    await run_program(life.lead() if world > 1 else life.run(), life.stop)
    return 0


class LearnerLife:
    def __init__(self, folder: RunFolder, config: Config, join: str | None) -> None:
        self._folder = folder
        self._config = config
        self._join = read_join(join)
        self._events: EventLog = ConsoleEvents("learner")
        self._clock = SystemClock()
        self._seed = secrets.randbits(63)
        self._stop = Recall()
        self._program: LearnerProgram | None = None
        self._own_worker: OwnWorker | None = None

    def stop(self, reason: str) -> None:
        if self._own_worker is not None:
            self._own_worker.stop(reason)
        if self._program is not None:
            self._program.stop(reason)
        else:
            self._stop.call()

    async def lead(self) -> None:
        """As rank 0 of several."""
        config, root = self._config, self._folder.root
        prepare, opened = partial(_resolve, config, root), partial(_open_torch, config, root)
        await group_life.lead(config, self._folder, prepare, opened, self.run)

    async def run(self, open_learner: OpenLearner | None = None) -> None:
        async with AsyncExitStack() as opened:
            line = HttpTransport(self._join, self._folder.learner / "credential")
            transport = await opened.enter_async_context(line)
            build = self._build(transport, open_learner or self._open, opened)
            try:
                program = await self._stop.within(None, "the start", build)
                if program is not None:
                    await self._live(program)
            except Fenced as error:
                # Not a failure: the newer learner goes on. Starting again would only fence that one out.
                self._events.emit("replaced", why=str(error))

    async def _live(self, program: LearnerProgram) -> None:
        """With a worker of its own, for as long as either has something to do; a failure of one ends both."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._own_worker is not None:
                    group.create_task(self._own_worker.run(), name="own worker")
                await program.run()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors

    async def _open(self, run_id: str) -> tuple[OpenedLearner, Mapping[AssetFile, Path]]:
        return await asyncio.to_thread(_open, self._config, self._folder, run_id)

    async def _build(
        self, transport: HttpTransport, open_learner: OpenLearner, opened: AsyncExitStack
    ) -> LearnerProgram:
        config = self._config
        enrolled = await enrol_patiently(transport, "learner", self._clock, self._events, Random(self._seed))
        self._events.emit("opening", model=config.model.path)
        try:
            learner, assets = await open_learner(enrolled.run_id)
        except IntegrityError as error:  # of what lies on the disk: starting again would not change it
            raise UserError(str(error)) from error
        self._events.emit("opened", step=learner.step)
        resident: Resident | None = None
        if config.workers.shared_device:
            learner, resident = await self._share(learner, opened)
        options = LearnerOptions(
            run_id=enrolled.run_id,
            initial_weights_hash=learner.initial_weights_hash,
            assets=assets,
            checkpoint_every_publishes=config.checkpoint.every_publishes,
            kept_snapshots=kept_snapshots(config),
            give_up_after_s=config.workers.orphan_after_s,
            jitter_seed=self._seed,
        )
        packer = _adapters(config, self._folder.root, enrolled.run_id) or DiskPacker(_find_changes(config))
        self._program = LearnerProgram(
            transport, transport, learner, packer, self._clock, self._events, options, resident
        )
        return self._program

    async def _share(self, learner: OpenedLearner, opened: AsyncExitStack) -> tuple[OpenedLearner, Resident]:
        """The learner that lends its weights to an engine, whose worker is started beside it, and whom to tell of
        versions. The engine is closed with ``opened``."""
        from echo2.learner.sharing import SharingLearner, shared_engine
        from echo2.learning.learner import TorchLearner

        assert isinstance(learner, TorchLearner), "the configuration was checked"
        model_dir = await asyncio.to_thread(_resolve, self._config, self._folder.root)
        engine = await asyncio.to_thread(shared_engine, learner, model_dir, self._config.learning.threads)
        opened.push_async_callback(engine.close)
        events = ConsoleEvents("own worker")
        self._own_worker = OwnWorker(self._config, self._folder, model_dir, engine, events)
        return SharingLearner(learner, engine), engine.settle


def kept_snapshots(config: Config) -> int:
    """Snapshot folders that the learner keeps: of the versions that a batch may hold, where rows are audited."""
    if not config.audited_rows:
        return KEPT_SNAPSHOTS
    needed = config.staleness_budget // config.publish_period + 2
    return max(KEPT_SNAPSHOTS, min(needed, MOST_SNAPSHOTS))


def _open(config: Config, folder: RunFolder, run_id: str) -> tuple[OpenedLearner, dict[AssetFile, Path]]:
    if config.learning.learner == "scripted":
        return ScriptedLearner.open(config, folder, run_id), {}
    return _open_torch(config, folder.root, run_id)


def _open_torch(
    config: Config, root: Path, run_id: str, group: Group | None = None
) -> tuple[TorchLearner, dict[AssetFile, Path]]:
    from echo2.learning.learner import TorchLearner
    from echo2.learning.pretrained import asset_paths
    from echo2.learning.ranks import ONE_RANK, together

    ranks = ONE_RANK if group is None else group.steps
    model_dir = together(ranks, lambda: _resolve(config, root))
    gold = gold_batches(config, model_dir) if config.model.warm_start_steps else None
    adapters = _adapters(config, root, run_id)
    learner = TorchLearner.open(
        config, root, run_id, resume=True, gold=gold, model_dir=model_dir, group=group,
        write_snapshot=_write_snapshot if adapters is None else adapters,
        keep_base=None if adapters is None else adapters.keep_base,
    )  # fmt: skip
    return learner, {_asset(path): path for path in asset_paths(model_dir)}


def _adapters(config: Config, root: Path, run_id: str) -> AdapterSnapshots | None:
    """None where all weights are trained."""
    if config.learning.learner == "scripted" or not config.lora.rank:
        return None
    return AdapterSnapshots(root / BASE_FOLDER, run_id, config.model.snapshot_dtype, config.lora.alpha)


def _resolve(config: Config, root: Path) -> Path:
    from echo2.learning.pretrained import resolve_model

    return resolve_model(config.model, root, seed=config.run.seed)


def _find_changes(config: Config) -> FindChanges:
    """Beside a GPU that trains, the GPU compares: the host's memory is slower, and its cores have other work."""
    if config.learning.learner == "scripted":
        return encode_changes
    from echo2.learning.policy_model import pick_device

    device = pick_device(config.learning.device)
    if device.type == "cpu":
        return encode_changes
    from echo2.learning.changes import TorchChanges

    found = TorchChanges(device)
    return lambda base, new: Changes(*found(base, new))


def _write_snapshot(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]],
    aliases: Mapping[str, str],
    *,
    run_id: str,
    policy: Policy,
    dtype: str,
    folder: Path,
) -> Manifest:
    streamed = {name: StreamedTensor(*tensor) for name, tensor in tensors.items()}
    return write_snapshot(streamed, aliases, run_id=run_id, policy=policy, dtype=dtype, folder=folder)


def _asset(path: Path) -> AssetFile:
    data = path.read_bytes()
    return AssetFile(path.name, len(data), blake3(data).hexdigest())
