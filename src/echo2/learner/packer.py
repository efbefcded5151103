"""What changed between two snapshots on the learner's disk, as an object to send.

Invariant: a delta is made against the snapshot that was written last before this one. That is the version published
last, or one that the coordinator does not have; then it asks for the whole.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from echo2.broadcast.changes import FindChanges
from echo2.broadcast.delta import write_delta
from echo2.broadcast.manifest import Manifest
from echo2.transport.partial import MANIFEST_NAME
from echo2.types import Policy, SnapshotKind


class DiskPacker:
    """Implements ``ports.SnapshotPacker`` in a thread; ``find_changes`` may do its part on a GPU."""

    def __init__(self, find_changes: FindChanges) -> None:
        self._find_changes = find_changes

    async def delta(self, manifest: Manifest, folder: Path) -> tuple[Manifest, Path] | None:
        return await asyncio.to_thread(self._delta, manifest.policy, folder)

    def _delta(self, policy: Policy, folder: Path) -> tuple[Manifest, Path] | None:
        base = newest_before(policy, folder.parent)
        if base is None:
            return None
        out = folder / SnapshotKind.DELTA.value
        made = write_delta(base, folder, out, changes=self._find_changes)
        return None if made is None else (made, out)


def newest_before(policy: Policy, folder: Path) -> Path | None:
    """The complete snapshot folder of the newest version older than ``policy``, beside which it lies."""
    found: list[tuple[Policy, Path]] = []
    for path in folder.iterdir():
        incarnation, _, version = path.name.partition(".")
        if incarnation.isdecimal() and version.isdecimal() and (path / MANIFEST_NAME).is_file():
            found.append((Policy(int(incarnation), int(version)), path))
    return max(((other, path) for other, path in found if other < policy), default=(policy, None))[1]
