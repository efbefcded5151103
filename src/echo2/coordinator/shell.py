"""The coordinator as a process: real sockets, the SQLite store, files for people, and join strings.

Invariant: everything that can be refused (a port in use, a store of another run, an expired certificate, a missing
task) is refused before the first join string is written.

In ``keys/``: ``snapshot`` signs manifests, ``ca.*`` and ``server.*`` are the TLS authority and certificate of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from echo2.broadcast import signing
from echo2.broadcast.disk_shelf import DiskShelf
from echo2.config.root import Config
from echo2.coordinator.files import FileEvents, FileLines
from echo2.coordinator.http import build_app
from echo2.coordinator.limits import Limits
from echo2.coordinator.operations import Loaded, Operation
from echo2.coordinator.pools import pools_of
from echo2.coordinator.program import Coordinator
from echo2.coordinator.scoring import ScoringProcess
from echo2.coordinator.seed import RelaySeed, seed_client
from echo2.coordinator.server import serve
from echo2.coordinator.store import SqliteStore
from echo2.data.cursor import PromptCursor
from echo2.data.registry import load_task
from echo2.durable import write_file
from echo2.errors import UserError, first_cause
from echo2.run.folder import RunFolder
from echo2.shell import RandomIds, SystemClock, run_program
from echo2.transport.join import JoinString
from echo2.transport.messages import Role
from echo2.transport.tls import ServerCertificate, ensure_certificates, utc_now

SECRET_MODE = 0o600
LEARNER_TOKEN_USES = 1000
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _DiskCoordinator(Coordinator):
    """A coordinator whose shelf has files that the HTTP surface can serve."""

    shelf: DiskShelf


async def run_coordinator(folder: RunFolder) -> None:
    """Serve the run in ``folder`` until it has ended. Raises UserError before anything is started."""
    config = folder.load()
    tasks = [(load_task(section), section.weight) for section in config.tasks]
    prompts = PromptCursor(tasks, config.run.seed)
    key = _snapshot_key(folder.root / "keys")
    tls = _certificate(config, folder.root / "keys")
    store = SqliteStore(folder.root / "buffer.sqlite")
    shelf = DiskShelf(folder.root / "snapshots", key)
    events = FileEvents(folder.root / "events.jsonl")
    try:
        loaded = await store.load()
        run_id = loaded.state.run_id if loaded.state else RandomIds().new("run")
        pools = pools_of(config, folder, run_id, SystemClock())
        lines = FileLines(folder.root, config, run_id, loaded, events)
        try:
            public = signing.public_key(key)
            seed = RelaySeed(
                seed_client(config, run_id, public, folder.root, events), shelf, folder.root / "keys", config
            )
            scorer = ScoringProcess(folder.root)
            coordinator = _DiskCoordinator(
                config, store, loaded, shelf, prompts, SystemClock(), RandomIds(), events, lines, seed,
                run_id=run_id, snapshot_public_key=public,
                task_fingerprints={task.name: task.fingerprint() for task, _ in tasks}, relays=seed.standings,
                pools=pools, scorer=scorer,
            )  # fmt: skip
            await run_program(_live(coordinator, seed, scorer, folder, loaded, tls), coordinator.books.request_stop)
        finally:
            lines.close()
    finally:
        store.close()
        shelf.close()
        events.close()


async def _live(
    coordinator: _DiskCoordinator,
    seed: RelaySeed,
    scorer: ScoringProcess,
    folder: RunFolder,
    loaded: Loaded,
    tls: ServerCertificate | None,
) -> None:
    """The relay first: a worker that joins may ask for it at once."""
    async with seed, scorer:
        await _serve(coordinator, folder, loaded, tls)


async def _serve(
    coordinator: _DiskCoordinator, folder: RunFolder, loaded: Loaded, tls: ServerCertificate | None
) -> None:
    config = coordinator.config
    limits = Limits(max_submit_bytes=config.coordinator.max_submit_bytes)
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    app = build_app(coordinator, coordinator.clock, limits, ca_pem=tls.ca_pem if tls else b"")
    port = config.coordinator.port or _port_before(folder)

    async def announce() -> None:
        """Consumes the bound port; waits for the sockets; unblocked by ``serve``; produces join strings."""
        listening = await bound
        operations = _write_joins(coordinator, folder, loaded, listening, tls)
        await coordinator.hall.store.commit(operations)
        coordinator.invitations.open(_address(config, listening, tls))
        told = {"host": _dialled_host(config), "port": listening, "pid": os.getpid()}
        write_file(folder.coordinator, msgspec.json.encode(told))
        write_file(folder.root / "keys" / "port", str(listening).encode())

    try:
        async with asyncio.TaskGroup() as group:
            server = group.create_task(
                serve(app, config.coordinator.host, port, tls, limits=limits, on_bound=bound.set_result), name="serve"
            )
            await _first_of(announce(), server)
            await coordinator.run()
            server.cancel()
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from errors
    with contextlib.suppress(FileNotFoundError):
        folder.coordinator.unlink()


async def _first_of(work: Any, server: asyncio.Task[None]) -> None:
    """Await ``work``, unless the server fails first."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work, name="announce")
        await asyncio.wait([task, server], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
    if server.done():
        server.result()


def _write_joins(
    coordinator: Coordinator, folder: RunFolder, loaded: Loaded, port: int, tls: ServerCertificate | None
) -> list[Operation]:
    """Join strings for each role, kept while their tokens are good; what the store must learn.

    Whoever removes a file and restarts the coordinator revokes the token that was in it.
    """
    config, operations = coordinator.config, list[Operation]()
    lifetime_s, uses = config.coordinator.join_token_ttl_s, config.coordinator.join_token_uses
    for role in (Role.WORKER, Role.LEARNER, Role.OPERATOR, Role.OBSERVER):
        path = folder.join(role.value)
        token = _token_in(path)
        if token is None or not coordinator.registry.knows_token(token):
            token = secrets.token_urlsafe(24)
            count = uses if role is Role.WORKER else LEARNER_TOKEN_USES
            expires = coordinator.clock.wall() + lifetime_s
            operations += coordinator.registry.revoke_tokens(role)
            operations += coordinator.registry.issue_token(token, role, expires, count)
        join = msgspec.structs.replace(_address(config, port, tls), token=token)
        write_file(path, f"{join}\n".encode(), SECRET_MODE)
    return operations


def _address(config: Config, port: int, tls: ServerCertificate | None) -> JoinString:
    """Where programs join, without a token."""
    fingerprint = tls.fingerprint if tls else None
    return JoinString(_dialled_host(config), port, tls is not None, "", fingerprint)


def _token_in(path: Path) -> str | None:
    try:
        return JoinString.parse(path.read_text().strip()).token
    except (FileNotFoundError, UserError):
        return None


def _dialled_host(config: Config) -> str:
    host = config.coordinator.advertise or config.coordinator.host
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _port_before(folder: RunFolder) -> int:
    """The port of the run's earlier life: workers that wait for it dial the same address again."""
    try:
        return int((folder.root / "keys" / "port").read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _snapshot_key(keys: Path) -> bytes:
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = keys / "snapshot"
    if not path.exists():
        write_file(path, signing.generate_key(), SECRET_MODE)
    return path.read_bytes()


def _certificate(config: Config, keys: Path) -> ServerCertificate | None:
    section = config.coordinator
    if section.tls == "off" or (section.tls == "auto" and section.host in _LOOPBACK):
        return None
    return ensure_certificates(keys, [_dialled_host(config), section.host], utc_now())
