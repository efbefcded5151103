"""Lines between programs, with latency, bandwidth, loss and outages.

Invariant: a request that a live coordinator received is handled there to the end, whatever becomes of the line, as over
HTTP; a reply may be lost after it took effect, so retries meet their own traces (field report D08). Large transfers are
fluid flows of at most 32 pieces through the coordinator's uplink and the peer's own line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec

from echo2.broadcast.manifest import Manifest
from echo2.errors import Echo2Error, TransportError
from echo2.metrics import Traffic
from echo2.simulation.memory import MemoryDisk
from echo2.simulation.shelf import MemoryShelf
from echo2.simulation.snapshots import check_object
from echo2.transport.messages import Principal, RelayCertificate, Reply, Request
from echo2.types import Policy

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
        uplink: Pipe, disk: MemoryDisk,
    ) -> None:  # fmt: skip
        self._desk = desk
        self._principal = principal
        self._link = link
        self._random = random
        self._shelf = shelf
        self._uplink = uplink
        self._own = Pipe(link.bytes_per_s)
        self._disk = disk
        self._folder = Path("objects") / principal.peer_id
        self._policies: dict[str, Policy] = {}
        self._received: dict[str, int] = {}
        self.cut = False
        """Set to take this peer's line down."""

    async def call(self, request: Request) -> Reply:
        await self._cross(len(msgspec.msgpack.encode(request)))
        reply = await self._desk.ask(self._principal, request)
        await self._cross(len(msgspec.msgpack.encode(reply)))
        return reply

    async def bring(self, signed: bytes, manifest: Manifest) -> Path:
        root, size = manifest.object_root, manifest.object_size
        self._policies[root] = manifest.policy
        for piece in range(self._received.get(root, 0) * PIECES // size, PIECES):
            self._check_line()
            await self._uplink.carry(size / PIECES)
            await self._own.carry(size / PIECES)
            self._received[root] = size * (piece + 1) // PIECES
        data = self._shelf.object_bytes(root)
        check_object(manifest, data)
        path = self._folder / root
        self._disk.write(path, data)
        return path

    def received(self) -> Mapping[str, int]:
        return self._received

    async def abandon(self, root: str) -> None:
        self._policies.pop(root, None)
        self._received.pop(root, None)
        self._disk.remove(self._folder / root)

    async def forget_before(self, policy: Policy) -> None:
        for root in [root for root, named in self._policies.items() if named < policy]:
            await self.abandon(root)

    async def upload(self, manifest: Manifest, path: Path, start: int) -> None:
        for _ in range(PIECES):
            self._check_line()
            await self._own.carry(manifest.object_size / PIECES)
        await self._shelf.write(manifest.object_root, start, self._disk.read(path))

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


class NoRelays:
    """``ports.Seed`` of a run whose objects all come from the coordinator itself."""

    async def publish(self, root: str) -> None: ...

    async def withdraw(self, root: str) -> None: ...

    async def certify(self, peer_id: str, public_key_pem: bytes) -> RelayCertificate:
        return RelayCertificate(b"", b"", "", 0)

    def traffic(self) -> Traffic:
        return Traffic()
