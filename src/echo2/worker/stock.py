"""The verified snapshots on a worker's disk.

Invariant (I6): what ``held`` lists was compared, byte for byte, with a manifest that the run's key signed, in this life
of the program; a folder without that manifest does not count. A folder appears with all its files or not at all.

    <folder>/<incarnation>.<version>/  model.safetensors  manifest.json  signed
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from echo2.broadcast.body import contents_of
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import LORA
from echo2.broadcast.signing import open_signed
from echo2.broadcast.snapshot import load_manifest, verify_snapshot
from echo2.broadcast.unpack import unpack
from echo2.durable import remove_folder
from echo2.errors import IntegrityError
from echo2.transport.partial import folder_name
from echo2.types import Policy
from echo2.worker.installer import SnapshotTerms

OnChange = Callable[[tuple[str, ...]], Awaitable[None]]

SIGNED_NAME = "signed"
SNAPSHOTS_KEPT = 2
"""Left on disk beside the installed one: a delta may come for each."""


class DiskStock:
    """Implements ``ports.SnapshotStock``; blocking work runs in threads."""

    def __init__(self, folder: Path, terms: SnapshotTerms, on_change: OnChange) -> None:
        """on_change: told the decoded roots of everything held whenever that changed."""
        self._folder = folder
        self._terms = terms
        self._on_change = on_change
        self._held: dict[Policy, str] = {}
        """Decoded roots."""
        self._based: dict[Policy, Policy] = {}
        """What held adapters were added to: those of the next version are, too."""

    def held(self) -> tuple[Policy, ...]:
        return tuple(sorted(self._held))

    def folder(self, policy: Policy) -> Path:
        assert policy in self._held, f"{policy} is not held"
        return self._folder / folder_name(policy)

    async def recover(self) -> None:
        """Hold again what earlier lives left whole; reads all of it. The rest is removed."""
        self._held.clear()
        self._based.clear()
        for manifest in await asyncio.to_thread(self._found):
            self._hold(manifest)
        await self._tell()

    async def build(self, signed: bytes, manifest: Manifest, object_path: Path) -> None:
        base = manifest.base
        if base is not None and self._held.get(base) != manifest.base_root:
            raise IntegrityError(f"the delta to {manifest.policy} applies to {base}, which is not held here")
        base_folder = None if base is None else self.folder(base)
        running = asyncio.ensure_future(asyncio.to_thread(self._build, signed, manifest, object_path, base_folder))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])  # the thread goes on writing; nothing else may write there meanwhile
            raise
        self._hold(manifest)
        await self._tell()

    async def tidy(self, installed: Policy | None) -> None:
        kept = {*self.held()[-SNAPSHOTS_KEPT:], *((installed,) if installed is not None else ())}
        kept |= {self._based[policy] for policy in kept if policy in self._based}
        unneeded = [policy for policy in self.held() if policy not in kept]
        for policy in unneeded:
            del self._held[policy]
            self._based.pop(policy, None)
            await asyncio.to_thread(remove_folder, self._folder / folder_name(policy))
        if unneeded:
            await self._tell()

    async def _tell(self) -> None:
        await self._on_change(tuple(self._held[policy] for policy in self.held()))

    def _build(self, signed: bytes, manifest: Manifest, object_path: Path, base_folder: Path | None) -> None:
        folder = self._folder / folder_name(manifest.policy)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # All in one: a disk that has room for the weights only would keep them, and want as much again at the next try.
        unpack(manifest, object_path, base_folder, folder, {SIGNED_NAME: signed})

    def _hold(self, manifest: Manifest) -> None:
        self._held[manifest.policy] = manifest.decoded_root
        if manifest.codec == LORA and manifest.base is not None:
            self._based[manifest.policy] = manifest.base

    def _found(self) -> list[Manifest]:
        found: list[Manifest] = []
        for folder in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            try:
                found.append(self._verified(folder))
            except (IntegrityError, FileNotFoundError, NotADirectoryError):
                remove_folder(folder)
        return found

    def _verified(self, folder: Path) -> Manifest:
        signed = open_signed((folder / SIGNED_NAME).read_bytes(), self._terms.public_key)
        raw = load_manifest(folder)
        if contents_of(raw) != contents_of(signed) or folder.name != folder_name(signed.policy):
            raise IntegrityError(f"{folder} does not hold what was signed")
        verify_snapshot(folder, raw)
        return signed
