"""The signed description of a snapshot.

Invariant (I6): whoever holds a verified manifest can decide, byte by byte and tensor by tensor, whether what it
received is the published policy. Names in a manifest are labels, never paths.
"""

from __future__ import annotations

import msgspec

from echo2.types import Policy, SnapshotKind


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the canonical uncompressed snapshot."""

    name: str
    dtype: str
    """safetensors name: BF16, F16, F32, I64 …"""
    shape: tuple[int, ...]
    nbytes: int
    blake3: str
    """Of the tensor's raw little-endian bytes."""


class Manifest(msgspec.Struct, frozen=True):
    """What a snapshot is and what its object's bytes hash to (DESIGN §8, PROTOCOL §5)."""

    run_id: str
    policy: Policy
    kind: SnapshotKind
    base: Policy | None
    """Policy that a delta applies to; None for an anchor."""
    base_root: str
    """Its decoded root; empty for an anchor."""
    codec: str
    """How the object encodes the tensors; `raw` is a safetensors file."""
    object_size: int
    object_root: str
    """blake3 of the object's bytes."""
    chunk_size: int
    chunks: tuple[str, ...]
    """blake3 of each chunk of the object."""
    decoded_root: str
    """blake3 over the canonical uncompressed tensors: the same after any path."""
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    """Tied tensors: name → name of the stored tensor."""
    dtype: str
    """The policy's declared element type, for example `bfloat16`."""


class SignedManifest(msgspec.Struct, frozen=True):
    manifest: bytes
    """JSON bytes of a ``Manifest``: what was signed, kept as it was."""
    signature: bytes
    """Ed25519 by the run's key over ``manifest``."""
