"""Lines between programs, with latency, bandwidth, loss and outages.

Invariant: a request that a live coordinator received is handled there to the end, whatever becomes of the line, as over
HTTP; a reply may be lost after it took effect, so retries meet their own traces (field report D08). Large transfers are
fluid flows of at most 32 pieces through the coordinator's uplink and the peer's own line.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec
from blake3 import blake3

from echo2.broadcast.manifest import Manifest
from echo2.errors import Echo2Error, IntegrityError, TransportError
from echo2.simulation.memory import MemoryDisk, MemoryShelf
from echo2.transport.messages import Principal, Reply, Request
from echo2.transport.partial import folder_name

PIECES = 32
"""Most pieces of one fluid transfer."""
OUTAGE_DELAY_S = 5.0
"""How long a caller waits before it believes that nobody answers."""


class Handler(Protocol):
    async def handle(self, principal: Principal, request: Request) -> Reply: ...


class LinkModel(msgspec.Struct, frozen=True):
    latency_s: float = 0.02
    """One way."""
    jitter: float = 0.2
    """Share of the latency that varies."""
    bytes_per_s: float = 12.5e6
    loss: float = 0.0
    """Probability that a request or a reply is lost."""


class Desk:
    """Where a coordinator's life receives requests; replaced when the coordinator restarts."""

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._under_way: dict[asyncio.Future[Reply], asyncio.Task[None]] = {}

    @property
    def is_open(self) -> bool:
        return self._handler is not None

    async def serve(self, handler: Handler, until: asyncio.Event) -> None:
        """Answer until ``until`` is set or this call is cancelled; requests under way die with it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._handler, self._tasks = handler, tasks
                await until.wait()
                for task in self._under_way.values():
                    task.cancel()
        finally:
            self._handler = self._tasks = None
            self._under_way = {}

    async def ask(self, principal: Principal, request: Request) -> Reply:
        """Raises TransportError when nobody serves, or the one who served died."""
        if self._handler is None or self._tasks is None:
            raise TransportError("connection refused: the coordinator is down")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        name = f"handle {type(request).__name__} of {principal.peer_id}"
        task = self._tasks.create_task(_answer(self._handler, principal, request, answer), name=name)
        self._under_way[answer] = task
        task.add_done_callback(lambda _: self._under_way.pop(answer, None))
        return await answer


async def _answer(handler: Handler, principal: Principal, request: Request, answer: asyncio.Future[Reply]) -> None:
    try:
        reply = await handler.handle(principal, request)
    except Echo2Error as error:
        if not answer.done():
            answer.set_exception(error)
    except asyncio.CancelledError:
        if not answer.done():
            answer.set_exception(TransportError("connection reset: the coordinator died"))
        raise
    else:
        if not answer.done():
            answer.set_result(reply)


class Pipe:
    """A line that serves pieces one after another; many transfers at once share it fairly by taking turns."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self.carried_bytes = 0.0

    async def carry(self, nbytes: float) -> None:
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + nbytes / self._bytes_per_s
        self.carried_bytes += nbytes
        await asyncio.sleep(self._free_at_s - now_s)


class VirtualLine:
    """One peer's Transport, SnapshotSource and SnapshotSink over its link."""

    def __init__(
        self, desk: Desk, principal: Principal, link: LinkModel, random: Random, shelf: MemoryShelf,
        uplink: Pipe, disk: MemoryDisk, snapshot_bytes: float,
    ) -> None:  # fmt: skip
        self._desk = desk
        self._principal = principal
        self._link = link
        self._random = random
        self._shelf = shelf
        self._uplink = uplink
        self._own = Pipe(link.bytes_per_s)
        self._disk = disk
        self._snapshot_bytes = snapshot_bytes
        self._fetched: list[Path] = []
        self.cut = False
        """Set to take this peer's line down."""

    async def call(self, request: Request) -> Reply:
        await self._cross(len(msgspec.msgpack.encode(request)))
        reply = await self._desk.ask(self._principal, request)
        await self._cross(len(msgspec.msgpack.encode(reply)))
        return reply

    async def fetch(self, manifest: Manifest, into: Path) -> Path:
        for _ in range(PIECES):
            self._check_line()
            await self._uplink.carry(self._snapshot_bytes / PIECES)
            await self._own.carry(self._snapshot_bytes / PIECES)
        data = self._shelf.object_bytes(manifest.policy)
        if blake3(data).hexdigest() != manifest.object_root:
            raise IntegrityError(f"snapshot {manifest.policy} does not hash to its manifest")
        folder = into / folder_name(manifest.policy)
        self._disk.write(folder, data)
        self._fetched.append(folder)
        self._disk.keep_newest(self._fetched, 2)
        return folder

    async def fetch_asset(self, name: str, size: int, blake3: str, into: Path) -> Path:
        await self._cross(size)
        return into / name

    async def upload(self, manifest: Manifest, folder: Path, start: int) -> None:
        for _ in range(PIECES):
            self._check_line()
            await self._own.carry(self._snapshot_bytes / PIECES)
        await self._shelf.write(manifest.policy, start, self._disk.read(folder)[start:])

    async def upload_asset(self, name: str, path: Path) -> None:
        raise TransportError(f"a modelled learner has no asset {name}")

    def _check_line(self) -> None:
        if self.cut or not self._desk.is_open:
            raise TransportError(f"the line of {self._principal.peer_id} is down")

    async def _cross(self, nbytes: int) -> None:
        """One way over the link. Raises TransportError after a while when the line is down or the message is lost."""
        delay_s = self._link.latency_s * (1 + self._link.jitter * self._random.random())
        lost = self._random.random() < self._link.loss
        if lost or self.cut:
            await asyncio.sleep(OUTAGE_DELAY_S)
            raise TransportError(f"no answer over the line of {self._principal.peer_id}")
        await asyncio.sleep(delay_s + nbytes / self._link.bytes_per_s)
