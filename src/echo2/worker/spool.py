"""A worker's outbox on disk.

Invariant: a group that ``put`` returned for survives the death of the process and of the machine; a file is whole or
absent. Lease ids come over the network and are kept inside the files, never in their names.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from echo2.durable import ASIDE, write_file
from echo2.errors import DiskFull

SPOOL_LIMIT_BYTES = 2 * 1024**3
"""Far beyond what the lanes of one worker can leave unsent; a spool this big means nobody empties it."""


class _Entry(msgspec.Struct, array_like=True):
    lease_id: str
    payload: bytes


class DiskSpool:
    def __init__(self, folder: Path, limit_bytes: int = SPOOL_LIMIT_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._paths: dict[str, Path] = {}
        self._bytes = 0
        self._next = 1 + max((int(path.stem) for path in folder.glob("*.group") if path.stem.isdigit()), default=0)
        self._one_at_a_time = asyncio.Lock()

    async def put(self, lease_id: str, payload: bytes) -> None:
        """Raises DiskFull when the disk or the spool is full."""
        async with self._one_at_a_time:
            await asyncio.to_thread(self._write, lease_id, payload)

    async def remove(self, lease_id: str) -> None:
        async with self._one_at_a_time:
            path = self._paths.pop(lease_id, None)
            if path is not None:
                self._bytes -= await asyncio.to_thread(_delete, path)

    async def pending(self) -> list[tuple[str, bytes]]:
        """Groups of an earlier life, oldest first; a file that does not parse is set aside as ``*.unreadable``."""
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._read_all)

    def _write(self, lease_id: str, payload: bytes) -> None:
        if self._bytes + len(payload) > self._limit_bytes:
            raise DiskFull(
                f"the spool {self._folder} must stay below {self._limit_bytes} bytes and holds {self._bytes}: "
                "see why the coordinator does not take its groups"
            )
        path = self._folder / f"{self._next:010d}.group"
        self._next += 1
        write_file(path, msgspec.msgpack.encode(_Entry(lease_id, payload)))
        self._paths[lease_id] = path
        self._bytes += path.stat().st_size

    def _read_all(self) -> list[tuple[str, bytes]]:
        for torn in self._folder.glob(f"*{ASIDE}"):
            torn.unlink()
        found: list[tuple[str, bytes]] = []
        self._bytes = 0
        for path in sorted(self._folder.glob("*.group")):
            data = path.read_bytes()
            try:
                entry = msgspec.msgpack.decode(data, type=_Entry)
            except msgspec.DecodeError:
                path.replace(path.with_suffix(".unreadable"))
                continue
            self._paths[entry.lease_id] = path
            self._bytes += len(data)
            found.append((entry.lease_id, entry.payload))
        return found


def _delete(path: Path) -> int:
    size = path.stat().st_size
    path.unlink()
    return size
