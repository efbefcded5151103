"""Objects that travel straight between the coordinator and a peer.

Invariant: a transfer is one flow through both ends' pipes; what came before the line went down is kept, in whole
pieces, and continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from echo2.broadcast.manifest import Manifest
from echo2.errors import TransportError
from echo2.metrics import Traffic
from echo2.simulation.flows import Flows, Pipe
from echo2.simulation.links import VirtualLine
from echo2.simulation.memory import MemoryDisk
from echo2.simulation.shelf import MemoryShelf
from echo2.simulation.snapshots import check_object
from echo2.transport.messages import RelayCertificate
from echo2.types import Policy

PIECES = 32
"""Of an object that are kept when its transfer ends early."""


class Carriage:
    """One object's bytes through pipes, for as long as the line is up. Use as a context, which ends the flow."""

    def __init__(self, flows: Flows, pipes: tuple[Pipe, ...], nbytes: float, line: VirtualLine) -> None:
        self._flows = flows
        self._line = line
        self._nbytes = nbytes
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flow = flows.open(pipes, nbytes, self._end)
        self._watched = (line.watchers, line.desk.watchers)
        for watchers in self._watched:
            watchers.append(self._look)
        self._look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._flows.close(self._flow)
        for watchers in self._watched:
            watchers.remove(self._look)

    def _look(self) -> None:
        if not self._line.is_up:
            self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def came(self) -> float:
        """Bytes so far."""
        return self._nbytes - self._flow.goal + self._flow.done(asyncio.get_running_loop().time())

    async def end(self) -> None:
        """Raises TransportError when the line went down before everything had come."""
        await self._ended
        if self._nbytes - self.came > 0.5:
            raise TransportError(f"the line of {self._line.principal.peer_id} is down")


class DirectLine:
    """SnapshotSource and SnapshotSink of one peer."""

    def __init__(self, line: VirtualLine, shelf: MemoryShelf, home: Pipe, disk: MemoryDisk, flows: Flows) -> None:
        """home: the coordinator's egress."""
        self._line = line
        self._shelf = shelf
        self._home = home
        self._disk = disk
        self._flows = flows
        self._folder = Path("objects") / line.principal.peer_id
        self._policies: dict[str, Policy] = {}
        self._received: dict[str, int] = {}
        self._under_way: dict[str, Carriage] = {}

    async def bring(self, signed: bytes, manifest: Manifest) -> Path:
        root, size = manifest.object_root, manifest.object_size
        self._policies[root] = manifest.policy
        pipes, missing = (self._home, self._line.access.down), size - self._received.get(root, 0)
        with Carriage(self._flows, pipes, missing, self._line) as carriage:
            self._under_way[root] = carriage
            try:
                await carriage.end()
            finally:
                self._received[root] = self._pieces(root, carriage, size)
                del self._under_way[root]
        data = self._shelf.object_bytes(root)
        check_object(manifest, data)
        path = self._folder / root
        self._disk.write(path, data)
        return path

    def received(self) -> Mapping[str, int]:
        under_way = {root: self._received.get(root, 0) + int(x.came) for root, x in self._under_way.items()}
        return self._received | under_way

    def _pieces(self, root: str, carriage: Carriage, size: int) -> int:
        came = self._received.get(root, 0) + carriage.came
        return size * int(came * PIECES / size + 1e-6) // PIECES

    async def abandon(self, root: str) -> None:
        self._policies.pop(root, None)
        self._received.pop(root, None)
        self._disk.remove(self._folder / root)

    async def forget_before(self, policy: Policy) -> None:
        for root in [root for root, named in self._policies.items() if named < policy]:
            await self.abandon(root)

    async def upload(self, manifest: Manifest, path: Path, start: int) -> None:
        size = manifest.object_size - start
        with Carriage(self._flows, (self._line.access.up,), size, self._line) as carriage:
            await carriage.end()
        await self._shelf.write(manifest.object_root, start, self._disk.read(path))

    async def upload_asset(self, name: str, path: Path) -> None:
        raise TransportError(f"a modelled learner has no asset {name}")


class NoRelays:
    """``ports.Seed`` of a run whose objects all come from the coordinator itself."""

    async def publish(self, root: str) -> None: ...

    async def withdraw(self, root: str) -> None: ...

    async def expel(self, peer_id: str) -> None: ...

    async def certify(self, peer_id: str, public_key_pem: bytes) -> RelayCertificate:
        return RelayCertificate(b"", b"", "", 0)

    def traffic(self) -> Traffic:
        return Traffic()
