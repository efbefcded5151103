"""The worker inside the learner's process: the production worker around an engine on the learner's weights.

Invariant: to the coordinator it is a worker like any other, with a credential, a spool and leases of its own; only
snapshots it never brings. It costs nothing beside the learner.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from random import Random

from echo2.config.root import Config
from echo2.data.registry import load_tasks
from echo2.data.template_chat import TemplateChat
from echo2.errors import UserError
from echo2.ports import EventLog
from echo2.rollout.apart import judged_apart
from echo2.run.folder import RunFolder
from echo2.shell import SystemClock
from echo2.transport.client import HttpTransport
from echo2.transport.enrolment import enrol_patiently
from echo2.transport.join import read_join
from echo2.transport.patience import Recall
from echo2.worker.installer import SnapshotTerms
from echo2.worker.program import Worker, WorkerOptions
from echo2.worker.residence import ResidentEngine
from echo2.worker.spool import DiskSpool

NAME = "shared"


class OwnWorker:
    def __init__(
        self, config: Config, folder: RunFolder, model_dir: Path, engine: ResidentEngine, events: EventLog
    ) -> None:
        """Raises UserError where the run's join string for workers is not."""
        join = folder.join("worker")
        if not join.is_file():
            raise UserError(
                f"workers.shared_device needs {join}, which the coordinator writes: run coordinator and learner on one "
                "machine (echo2 train), or set workers.shared_device to false"
            )
        self._join = read_join(str(join))
        self._config = config
        self._folder = folder.worker(NAME)
        self._model_dir = model_dir
        self._engine = engine
        self._events = events
        self._seed = secrets.randbits(63)
        self._stop = Recall()
        self._worker: Worker | None = None

    def stop(self, reason: str) -> None:
        if self._worker is not None:
            self._worker.drain(reason)
        else:
            self._stop.call()

    async def run(self) -> None:
        """Until drained. Raises what ``Worker.run`` does."""
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        transport = HttpTransport(self._join, self._folder / "credential", usd_per_h=0.0)
        try:
            self._worker = await self._stop.within(None, "the start", self._build(transport))
            if self._worker is not None:
                await self._worker.run()
        finally:
            await transport.close()

    async def _build(self, transport: HttpTransport) -> Worker:
        config, clock = self._config, SystemClock()
        enrolled = await enrol_patiently(transport, NAME, clock, self._events, Random(self._seed))
        tasks = await asyncio.to_thread(load_tasks, config.tasks)
        chat = await asyncio.to_thread(TemplateChat, self._model_dir)
        options = WorkerOptions(
            snapshots=SnapshotTerms(enrolled.run_id, enrolled.snapshot_public_key, config.model.snapshot_dtype),
            heartbeat_s=config.coordinator.heartbeat_s,
            concurrent_groups=config.rollout.concurrent_groups,
            orphan_after_s=config.workers.orphan_after_s,
            thinking=config.rollout.thinking,
            jitter_seed=self._seed,
        )
        spool = DiskSpool(self._folder / "spool")
        return Worker(
            transport, None, None, self._engine, tasks, chat, spool, clock, self._events, options, None, judged_apart,
            self._engine,
        )  # fmt: skip
