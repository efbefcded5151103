"""Snapshots of modelled sizes: true manifests, checked by the production code, over objects of a few bytes.

Invariant (I6): the few bytes say which weights they stand for, so whoever decodes an object, or applies a delta to a
base, ends with the weights of the manifest or with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import msgspec
from blake3 import blake3

from echo2.broadcast.layout import TensorShape, header_bytes
from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.broadcast.parse import MAX_CHUNK_BYTES, chunk_size_for, encode_manifest, parse_manifest, roots_of
from echo2.broadcast.signing import open_signed
from echo2.errors import IntegrityError
from echo2.simulation.memory import MemoryDisk
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME, folder_name
from echo2.types import Policy, SnapshotKind
from echo2.worker.installer import SnapshotTerms

DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SMALL_BYTES = 128
MOST_CHUNKS = 1024
"""Of a modelled object: manifests of thousands of workers' polls stay small, and a hop is short all the same."""
SNAPSHOTS_KEPT = 2


def modelled_snapshot(
    run_id: str, policy: Policy, dtype: str, weights: str, nbytes: float = SMALL_BYTES
) -> tuple[Manifest, bytes]:
    """A raw snapshot whose one tensor has about ``nbytes`` bytes, and the bytes that stand for its object."""
    width = 4 if dtype == "float32" else 2
    shape = TensorShape("weights", DTYPE_NAMES[dtype], (max(1, int(nbytes) // width),))
    entry = TensorEntry(shape.name, shape.dtype, shape.shape, shape.nbytes, _hash(weights.encode()))
    manifest = Manifest(
        run_id=run_id,
        policy=policy,
        kind=SnapshotKind.ANCHOR,
        base=None,
        base_root="",
        codec="raw",
        object_size=0,
        object_root="",
        chunk_size=MAX_CHUNK_BYTES,
        chunks=(),
        decoded_root=roots_of([entry]),
        tensors=(entry,),
        aliases={},
        dtype=dtype,
    )
    return _sized(manifest, len(header_bytes([shape])) + shape.nbytes, f"raw {policy} {weights}".encode())


def modelled_delta(new: Manifest, data: bytes, base: Manifest, nbytes: float) -> tuple[Manifest, bytes]:
    """The object of ``nbytes`` that turns snapshot ``base`` into ``new``, whose raw object is ``data``."""
    weights = weights_of(data)
    manifest = msgspec.structs.replace(
        new, kind=SnapshotKind.DELTA, base=base.policy, base_root=base.decoded_root, codec="delta"
    )
    return _sized(manifest, max(1, int(nbytes)), f"delta {base.policy} {new.policy} {weights}".encode())


def weights_of(data: bytes) -> str:
    """What an object decodes to."""
    return data.decode().rsplit(" ", 1)[-1]


def check_decoded(manifest: Manifest, data: bytes) -> None:
    """Raises IntegrityError unless the object's bytes decode to the weights of the manifest."""
    if _hash(weights_of(data).encode()) != manifest.tensors[0].blake3:
        raise IntegrityError(f"the object of {manifest.policy} decodes to other weights")


def check_object(manifest: Manifest, data: bytes) -> None:
    """Raises IntegrityError unless ``data`` is the manifest's object."""
    if _hash(data) != manifest.object_root:
        raise IntegrityError(f"the object of {manifest.policy} does not hash to its manifest")


class ModelledPacker:
    """``ports.SnapshotPacker``: every delta has the same size."""

    def __init__(self, disk: MemoryDisk, delta_bytes: float, encode_s: float = 0.0) -> None:
        self._disk = disk
        self._delta_bytes = delta_bytes
        self._encode_s = encode_s

    async def delta(self, manifest: Manifest, folder: Path) -> tuple[Manifest, Path] | None:
        found = [read_manifest(self._disk, other) for other in self._disk.folders(MANIFEST_NAME, folder.parent)]
        older = [other for other in found if other.policy < manifest.policy]
        if not older or not 0 < self._delta_bytes < manifest.object_size:
            return None
        await asyncio.sleep(self._encode_s)
        base = max(older, key=lambda other: other.policy)
        made, data = modelled_delta(manifest, self._disk.read(folder / OBJECT_NAME), base, self._delta_bytes)
        self._disk.write(folder / "delta", data)
        return made, folder / "delta"


class MemoryStock:
    """``ports.SnapshotStock``, on a disk that survives the worker."""

    def __init__(self, disk: MemoryDisk, folder: Path, decode_s: float = 0.0) -> None:
        """decode_s: time that every object takes."""
        self._disk = disk
        self._folder = folder
        self._decode_s = decode_s
        self._manifests = disk.stocks.setdefault(folder, {})

    def held(self) -> tuple[Policy, ...]:
        return tuple(sorted(self._manifests))

    def folder(self, policy: Policy) -> Path:
        return self._folder / folder_name(policy)

    async def build(self, signed: bytes, manifest: Manifest, object_path: Path) -> None:
        data = self._disk.read(object_path)
        check_object(manifest, data)
        if manifest.base is not None:
            base = self._manifests.get(manifest.base)
            if base is None or base.decoded_root != manifest.base_root:
                raise IntegrityError(f"the delta to {manifest.policy} applies to {manifest.base}, which is not held")
        check_decoded(manifest, data)
        if self._decode_s:
            await asyncio.sleep(self._decode_s)
        self._manifests[manifest.policy] = manifest

    def roots(self) -> Collection[str]:
        """Decoded roots of what is held."""
        return [manifest.decoded_root for manifest in self._manifests.values()]

    async def tidy(self, installed: Policy | None) -> None:
        for policy in self.held()[:-SNAPSHOTS_KEPT]:
            if policy != installed:
                del self._manifests[policy]


def read_manifest(disk: MemoryDisk, folder: Path) -> Manifest:
    return _parsed(disk.read(folder / MANIFEST_NAME))


@lru_cache(maxsize=256)
def _parsed(data: bytes) -> Manifest:
    """Every worker of a world reads the same few."""
    return parse_manifest(data)


@lru_cache(maxsize=256)
def _opened(signed: bytes, public_key: bytes) -> Manifest:
    return open_signed(signed, public_key)


class SharedTerms(SnapshotTerms, frozen=True):
    """All workers of a world check the same signatures: once is enough."""

    def open(self, signed: bytes) -> Manifest:
        return _opened(signed, self.public_key)


def _sized(manifest: Manifest, nbytes: int, data: bytes) -> tuple[Manifest, bytes]:
    root = _hash(data)
    chunk = max(chunk_size_for(nbytes), -(-nbytes // MOST_CHUNKS))
    chunks = (root,) * -(-nbytes // chunk)
    sized = msgspec.structs.replace(manifest, object_size=nbytes, object_root=root, chunk_size=chunk, chunks=chunks)
    return parse_manifest(encode_manifest(sized)), data


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()
