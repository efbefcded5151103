"""The coordinator's shelf in memory: the decisions of the one on disk, over modelled objects.

Invariant: as ``broadcast.shelf``; what was published survives the coordinator, and an upload that was not finished
does too.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec
from blake3 import blake3

from echo2.broadcast.catalogue import Entry
from echo2.broadcast.keeping import needed_roots
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest
from echo2.broadcast.shelf import Published
from echo2.broadcast.signing import encode_signed, sign
from echo2.errors import IntegrityError, Refused
from echo2.simulation.snapshots import check_decoded, check_object, modelled_snapshot, weights_of
from echo2.transport.messages import AssetFile
from echo2.types import Policy, SnapshotKind


class _Object(msgspec.Struct, frozen=True):
    entry: Entry
    manifest: Manifest
    signed: bytes
    data: bytes


class MemoryShelf:
    def __init__(self, private_key: bytes) -> None:
        self._private_key = private_key
        self._uploads: dict[Policy, tuple[Manifest, bytes | None]] = {}
        self._raw: dict[Policy, tuple[Manifest, bytes]] = {}
        self._roots: dict[Policy, str] = {}
        """Decoded roots of all published versions."""
        self._objects: dict[str, _Object] = {}
        self._assets: dict[str, str] = {}

    def object_bytes(self, root: str) -> bytes:
        """What stands for a published object. Raises Refused when it is not (any more) on the shelf."""
        if root not in self._objects:
            raise Refused("this object is not on the shelf; ask for the current path")
        return self._objects[root].data

    async def offer(self, manifest: Manifest) -> int | None:
        policy = manifest.policy
        if policy in self._roots:
            if self._roots[policy] != manifest.decoded_root:
                raise Refused(f"version {policy} was published with other weights; a version never changes")
            return manifest.object_size
        if manifest.base is not None and self._base_root(manifest.base) != manifest.base_root:
            return None
        offered, data = self._uploads.get(policy, (None, None))
        if offered != manifest:
            data = None
        self._uploads[policy] = (manifest, data)
        return 0 if data is None else manifest.object_size

    async def write(self, root: str, offset: int, data: bytes) -> int:
        for policy, (manifest, _) in self._uploads.items():
            if manifest.object_root == root:
                check_object(manifest, data)
                self._uploads[policy] = (manifest, data)
                return manifest.object_size
        raise Refused("this object is not being uploaded; offer it first")

    async def finish(self, policy: Policy, root: str) -> Published:
        if policy not in self._roots:
            manifest, data = self._uploads.pop(policy, (None, None))
            if manifest is None or data is None or manifest.object_root != root:
                raise Refused(f"the object of {policy} is not here; offer it first")
            check_decoded(manifest, data)
            nbytes = manifest.tensors[0].nbytes
            raw = modelled_snapshot(manifest.run_id, policy, manifest.dtype, weights_of(data), nbytes)
            self._raw[policy], self._roots[policy] = raw, manifest.decoded_root
            self._add(manifest, data)
        entries = [entry for entry in self.catalogue() if entry.policy == policy]
        return Published(entries[0], self._raw[policy][0].object_size)

    async def add_anchor(self, policy: Policy) -> str | None:
        for entry in self.catalogue():
            if entry.policy == policy and entry.kind is SnapshotKind.ANCHOR:
                return entry.root
        return self._add(*self._raw[policy]) if policy in self._raw else None

    async def prune(self, keep: Set[Policy], held: Set[Policy], under_way: Set[str]) -> tuple[str, ...]:
        kept = needed_roots(self.catalogue(), keep, held, under_way)
        gone = tuple(root for root in self._objects if root not in kept)
        for root in gone:
            del self._objects[root]
        newest = max(self._roots, default=None)
        self._raw = {policy: raw for policy, raw in self._raw.items() if policy in keep or policy == newest}
        self._uploads = {p: upload for p, upload in self._uploads.items() if newest is None or p > newest}
        return gone

    def catalogue(self) -> list[Entry]:
        entries = [found.entry for found in self._objects.values()]
        return sorted(entries, key=lambda entry: (entry.policy, entry.kind is SnapshotKind.ANCHOR))

    def signed(self, root: str) -> bytes | None:
        return self._objects[root].signed if root in self._objects else None

    def manifest(self, root: str) -> Manifest | None:
        return self._objects[root].manifest if root in self._objects else None

    async def missing_assets(self, assets: Sequence[AssetFile]) -> tuple[str, ...]:
        return tuple(asset.name for asset in assets if self._assets.get(asset.name) != asset.blake3)

    async def write_asset(self, asset: AssetFile, data: bytes) -> None:
        if blake3(data).hexdigest() != asset.blake3:
            raise IntegrityError(f"asset {asset.name} does not hash to its description")
        self._assets[asset.name] = asset.blake3

    def _base_root(self, policy: Policy) -> str:
        return self._raw[policy][0].decoded_root if policy in self._raw else ""

    def _add(self, manifest: Manifest, data: bytes) -> str:
        entry = Entry(
            manifest.policy, manifest.kind, manifest.base, manifest.object_root, manifest.object_size,
            manifest.decoded_root,
        )  # fmt: skip
        signed = encode_signed(sign(encode_manifest(manifest), self._private_key))
        self._objects[entry.root] = _Object(entry, manifest, signed, data)
        return entry.root
