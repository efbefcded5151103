"""A worker as a process: real ports around ``Worker``.

Invariant: everything a worker is comes from its run: configuration, tokenizer and weights over an authenticated line,
tasks from modules installed here, and never code from the wire. What it must remember lies in its own folder, so the
same folder starts the same worker again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

from echo2.broadcast.relay.client import RelayClient
from echo2.config.root import Config
from echo2.config.server_file import load_server
from echo2.data.chat import ByteChat, ChatFormat
from echo2.data.registry import load_tasks
from echo2.data.template_chat import TemplateChat
from echo2.errors import DiskFull, Echo2Error, IntegrityError, Refused, TransportError, Unauthorised
from echo2.pace import Pace
from echo2.ports import EventLog, SnapshotSource
from echo2.rollout.apart import judged_apart
from echo2.rollout.engines import build_engine, check_kind
from echo2.shell import ConsoleEvents, SystemClock, run_program
from echo2.transport.client import HttpTransport
from echo2.transport.enrolment import JOIN_PATIENCE_S, enrol_patiently
from echo2.transport.join import read_join
from echo2.transport.messages import AssetFile, CertifyRelay, Enrolled, Hello, RelayCertificate, Welcome
from echo2.transport.patience import Backoff, Line, Recall
from echo2.transport.tls import new_peer_key
from echo2.worker.installer import SnapshotTerms
from echo2.worker.program import Worker, WorkerOptions
from echo2.worker.relay import RelaySource, opening
from echo2.worker.source import HttpSource
from echo2.worker.spool import DiskSpool
from echo2.worker.stock import DiskStock, OnChange


async def run_worker(
    join: str | None,
    name: str,
    folder: Path,
    device: str | None = None,
    threads: int = 0,
    usd_per_h: float | None = None,
    engine: str | None = None,
    server: Path | None = None,
) -> None:
    """Join the run, work until drained. ``device``, ``usd_per_h`` and ``engine`` override what the run's configuration
    says; ``threads`` is of the CPU, 0 for as many as this process may use; ``server`` is the file whose [server] table
    describes this machine's inference server.

    Raises UserError or Unauthorised for a join string that is no good, Refused when tasks differ, Starved when the
    coordinator fell silent.
    """
    life = WorkerLife(join, name, folder, device, threads, usd_per_h, engine, server)
    await run_program(life.run(), life.stop)


class WorkerLife:
    """From nothing to a running worker, and back; every stage can be stopped."""

    def __init__(
        self,
        join: str | None,
        name: str,
        folder: Path,
        device: str | None,
        threads: int,
        usd_per_h: float | None = None,
        engine: str | None = None,
        server: Path | None = None,
    ) -> None:
        self._join = read_join(join)
        self._engine = engine
        # From this machine alone, never from the coordinator's configuration: it says which program is run here.
        self._server = load_server(server)
        self._name = name
        self._folder = folder
        self._device = device
        self._threads = threads
        self._usd_per_h = usd_per_h
        self._events: EventLog = ConsoleEvents(f"worker {name}")
        self._clock = SystemClock()
        self._seed = secrets.randbits(63)
        self._stop = Recall()
        self._worker: Worker | None = None

    def stop(self, reason: str) -> None:
        if self._worker is not None:
            self._worker.drain(reason)
        else:
            self._stop.call()

    async def run(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        async with AsyncExitStack() as opened:
            line = HttpTransport(self._join, self._folder / "credential", usd_per_h=self._usd_per_h)
            transport = await opened.enter_async_context(line)
            worker = await self._stop.within(None, "the start", self._build(transport, opened))
            if worker is not None:
                await worker.run()

    async def _build(self, transport: HttpTransport, opened: AsyncExitStack) -> Worker:
        """The worker; what it needs open is closed with ``opened``."""
        jitter = Random(self._seed)
        enrolled = await enrol_patiently(transport, self._name, self._clock, self._events, jitter)
        spool = DiskSpool(self._folder / "spool")
        held = tuple(lease_id for lease_id, _ in await spool.pending())
        welcome, config = await self._welcome(transport, held, jitter)
        terms = SnapshotTerms(enrolled.run_id, enrolled.snapshot_public_key, config.model.snapshot_dtype)
        # Early: other relays send what was published meanwhile while the engine is being loaded.
        source, on_held = await self._open_source(transport, enrolled, jitter, opened)
        stock = DiskStock(self._folder / "snapshots", terms, on_held)
        await stock.recover()
        model_dir = self._folder / "model"
        await self._fetch_assets(transport, welcome.assets, model_dir, jitter)
        tasks = await asyncio.to_thread(load_tasks, config.tasks)
        kind = self._engine or config.rollout.engine
        check_kind(kind)
        scripted = kind == "scripted"
        chat: ChatFormat = ByteChat() if scripted else await asyncio.to_thread(TemplateChat, model_dir)
        engine = await asyncio.to_thread(
            build_engine, kind, None if scripted else model_dir,
            device=config.workers.device if self._device is None else self._device,
            threads=self._threads,
            dtype=config.model.snapshot_dtype,
            pace=Pace(config.rehearsal.group_s, config.rehearsal.group_spread),
            server=self._server,
            folder=self._folder / "engine",
            events=self._events,
        )  # fmt: skip
        opened.push_async_callback(engine.close)
        options = WorkerOptions(
            snapshots=terms,
            heartbeat_s=welcome.heartbeat_s,
            concurrent_groups=config.rollout.concurrent_groups,
            orphan_after_s=config.workers.orphan_after_s,
            thinking=config.rollout.thinking,
            jitter_seed=self._seed,
        )
        self._worker = Worker(
            transport, source, stock, engine, tasks, chat, spool, self._clock, self._events, options, None, judged_apart
        )
        return self._worker

    async def _open_source(
        self, transport: HttpTransport, enrolled: Enrolled, jitter: Random, opened: AsyncExitStack
    ) -> tuple[SnapshotSource, OnChange]:
        """Where objects come from, and who wants to know what lies decoded here."""
        folder = self._folder / "objects"
        private, public = new_peer_key()
        line = Line(transport, self._clock, self._events, jitter, JOIN_PATIENCE_S)
        certified = await line.call(CertifyRelay(public), RelayCertificate)
        http = HttpSource(transport, folder)
        if not certified.seed_port:
            return http, _unheard
        source = RelaySource(http, folder, self._events)
        order = opening(self._join, enrolled, certified, private, folder)
        relay = RelayClient(order, self._events, source.announced)
        try:
            await opened.enter_async_context(relay)
        except (Echo2Error, OSError) as error:
            self._events.emit("relay_absent", error=str(error))
            return http, _unheard
        source.use(relay)
        return source, relay.hold

    async def _welcome(self, transport: HttpTransport, held: tuple[str, ...], jitter: Random) -> tuple[Welcome, Config]:
        """What to be. The worker says hello once more when it is, with its tasks' fingerprints."""
        line = Line(transport, self._clock, self._events, jitter, JOIN_PATIENCE_S)
        told = False
        while True:
            welcome = await line.call(Hello(held, {}), Welcome)
            config = Config.model_validate_json(welcome.config_json)
            if welcome.assets or config.rollout.engine == "scripted":
                return welcome, config
            if not told:
                self._events.emit("waiting", reason="no learner has brought the model's files to the run yet")
                told = True
                await asyncio.to_thread(_load_engine_code, config.rollout.engine)
            await asyncio.sleep(welcome.heartbeat_s * (0.5 + jitter.random()))

    async def _fetch_assets(
        self, transport: HttpTransport, assets: Sequence[AssetFile], into: Path, jitter: Random
    ) -> None:
        backoff = Backoff(jitter)
        for asset in assets:
            while True:
                try:
                    await transport.fetch_asset(asset.name, asset.size, asset.blake3, into)
                    break
                except Unauthorised:
                    raise
                except (TransportError, Refused, IntegrityError, DiskFull) as error:
                    # Refused: the learner has announced the file and is still bringing it.
                    pause_s = backoff.next_s()
                    self._events.emit("asset_lost", asset=asset.name, error=str(error), retry_in_s=round(pause_s, 1))
                    await asyncio.sleep(pause_s)


async def _unheard(roots: tuple[str, ...]) -> None:
    """Without a relay nobody asks what is held."""


def _load_engine_code(kind: str) -> None:
    """Spend a wait on the slow imports; what is missing is told when the engine is built."""
    with contextlib.suppress(ImportError):
        importlib.import_module(f"echo2.rollout.engines.{kind}")
