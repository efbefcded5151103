"""A worker's relay as its program sees it, whatever models the relays.

Invariant: as ``worker.relay.RelaySource``: what is brought is whole and checked; a line that is down brings nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from echo2.broadcast.manifest import Manifest
from echo2.errors import TransportError
from echo2.metrics import Traffic
from echo2.simulation.links import VirtualLine
from echo2.simulation.memory import MemoryDisk
from echo2.simulation.shelf import MemoryShelf
from echo2.simulation.snapshots import MemoryStock, check_object
from echo2.transport.messages import RelayCertificate
from echo2.types import Policy


class Relays(Protocol):
    """``ports.Seed``, and the relays of all workers."""

    async def publish(self, root: str) -> None: ...

    async def withdraw(self, root: str) -> None: ...

    async def expel(self, peer_id: str) -> None: ...

    async def certify(self, peer_id: str, public_key_pem: bytes) -> RelayCertificate: ...

    def traffic(self) -> Traffic: ...

    def join(self, line: VirtualLine, relay: Relayed) -> None: ...

    def leave(self, name: str) -> None: ...

    def ask(self, name: str, manifest: Manifest) -> None: ...

    def share(self, name: str, root: str) -> float: ...

    def drop(self, name: str, root: str) -> None: ...


class Relayed:
    """``ports.SnapshotSource`` of one worker's life."""

    def __init__(
        self, relays: Relays, line: VirtualLine, stock: MemoryStock, shelf: MemoryShelf, disk: MemoryDisk
    ) -> None:
        self._relays = relays
        self._line = line
        self._stock = stock
        self._shelf = shelf
        self._disk = disk
        self._name = line.principal.peer_id
        self._folder = Path("objects") / self._name
        self._manifests: dict[str, Manifest] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        line.watchers.append(self._line_changed)
        relays.join(line, self)

    def held(self) -> Collection[str]:
        """Decoded roots of the snapshots that deltas may build on."""
        return self._stock.roots()

    def whole(self, root: str) -> None:
        """All of the object is here."""
        waiter = self._waiting.get(root)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _line_changed(self) -> None:
        if not self._line.cut:
            self._relays.join(self._line, self)
            return
        self._relays.leave(self._name)
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(None)

    async def bring(self, signed: bytes, manifest: Manifest) -> Path:
        root = manifest.object_root
        self._manifests[root] = manifest
        waiter = self._waiting[root] = asyncio.get_running_loop().create_future()
        try:
            self._relays.ask(self._name, manifest)
            if self._relays.share(self._name, root) < 1 and not self._line.cut:
                await waiter
            if self._relays.share(self._name, root) < 1:
                raise TransportError(f"the line of {self._name} is down")
        finally:
            del self._waiting[root]
        data = self._shelf.object_bytes(root)
        check_object(manifest, data)
        path = self._folder / root
        self._disk.write(path, data)
        return path

    def received(self) -> Mapping[str, int]:
        return {
            root: int(self._relays.share(self._name, root) * manifest.object_size)
            for root, manifest in self._manifests.items()
        }

    async def abandon(self, root: str) -> None:
        if self._manifests.pop(root, None) is not None:
            self._relays.drop(self._name, root)
        self._disk.remove(self._folder / root)

    async def forget_before(self, policy: Policy) -> None:
        for root in [root for root, manifest in self._manifests.items() if manifest.policy < policy]:
            await self.abandon(root)
