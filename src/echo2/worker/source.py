"""Where a worker's objects come from.

Invariant (I6): an object's file is given out only when all its chunks were compared with the signed manifest, whoever
brought them; a file that is not whole is continued by whoever comes next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.relay.chunks import ChunkFile
from echo2.transport.client import HttpTransport
from echo2.transport.partial import is_root
from echo2.types import Policy


class HttpSource:
    """Objects straight from the coordinator, kept in a folder under their roots."""

    def __init__(self, transport: HttpTransport, folder: Path) -> None:
        self._transport = transport
        self._folder = folder
        self._policies: dict[str, Policy] = {}
        self._received: dict[str, int] = {}

    async def bring(self, signed: bytes, manifest: Manifest) -> Path:
        root = manifest.object_root
        self._policies[root] = manifest.policy
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        path = self._folder / root
        file = await asyncio.to_thread(ChunkFile, path, manifest)
        try:
            await self._transport.fetch_object(manifest, file)
        finally:
            self._received[root] = sum(file.length(number) for number in range(file.count) if file.has(number))
            file.close()
        return path

    def received(self) -> Mapping[str, int]:
        return self._received

    async def abandon(self, root: str) -> None:
        await self.forget([root])

    async def forget_before(self, policy: Policy) -> None:
        """Also files whose version is not known: an earlier life left them."""
        known = {root for root, named in self._policies.items() if named >= policy}
        await self.forget(await asyncio.to_thread(roots_in, self._folder) - known)

    async def forget(self, roots: Collection[str]) -> None:
        for root in roots:
            self._policies.pop(root, None)
            self._received.pop(root, None)
            await asyncio.to_thread((self._folder / root).unlink, missing_ok=True)


def roots_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if is_root(path.name)} if folder.is_dir() else set()
