"""Objects to broadcast: random bytes under a signed manifest.

Invariant: to relays an object is opaque, so random bytes stand for a delta; each object is a delta from the one before
it, as published policies are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.broadcast.parse import chunk_size_for, encode_manifest, parse_manifest, roots_of
from echo2.broadcast.signing import encode_signed, sign
from echo2.types import Policy, SnapshotKind


@dataclass(frozen=True)
class WireObject:
    path: Path
    manifest: Manifest
    signed: bytes


def write_random(path: Path, nbytes: int, number: int) -> None:
    """The same number gives the same bytes."""
    path.write_bytes(np.random.default_rng(number).bytes(nbytes))


def decoded_root(version: int, nbytes: int) -> str:
    """Of the snapshot that version ``version`` decodes to, were there one."""
    return roots_of(_tensors(version, nbytes))


def write_object(folder: Path, run_id: str, key: bytes, version: int, nbytes: int, base_root: str) -> WireObject:
    """Version ``version`` as a delta of ``nbytes`` from the one before it."""
    path = folder / f"{version}.object"
    write_random(path, nbytes, version)
    data, chunk_size = path.read_bytes(), chunk_size_for(nbytes)
    tensors = _tensors(version, nbytes)
    manifest = Manifest(
        run_id=run_id,
        policy=Policy(0, version),
        kind=SnapshotKind.DELTA,
        base=Policy(0, version - 1),
        base_root=base_root,
        codec="delta",
        object_size=nbytes,
        object_root=blake3(data).hexdigest(),
        chunk_size=chunk_size,
        chunks=tuple(blake3(data[at : at + chunk_size]).hexdigest() for at in range(0, nbytes, chunk_size)),
        decoded_root=roots_of(tensors),
        tensors=tensors,
        aliases={},
        dtype="bfloat16",
    )
    encoded = encode_manifest(manifest)
    parse_manifest(encoded)
    return WireObject(path, manifest, encode_signed(sign(encoded, key)))


def _tensors(version: int, nbytes: int) -> tuple[TensorEntry, ...]:
    """One tensor, larger than the object: no delta is longer than what it changes."""
    elements = nbytes // 2 + 1
    return (
        TensorEntry("weights", "BF16", (elements,), 2 * elements, blake3(f"version {version}".encode()).hexdigest()),
    )
