"""Manifests as bytes and back.

Invariant (I9): a ``Manifest`` that left ``parse_manifest`` is consistent in itself: counts and sizes add up, hashes
have the length of hashes, aliases name stored tensors, and the decoded root follows from the tensors. Names in it stay
labels; no path is ever made from one (E03).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3

from echo2.broadcast.layout import MAX_NAME_CHARACTERS, TensorShape, check_tensor, header_bytes
from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.errors import IntegrityError
from echo2.types import SnapshotKind

RAW, PLANES, DELTA, LORA = "raw", "planes", "delta", "lora"
"""Codecs: the safetensors file itself; byte planes, each compressed; changes of a base; adapters of a base."""
_CODECS = {SnapshotKind.ANCHOR: (RAW, PLANES), SnapshotKind.DELTA: (DELTA, LORA)}

MAX_MANIFEST_BYTES = 32 * 1024 * 1024
"""A 1 TB object of 4 MiB chunks has 18 MB of chunk hashes."""
MIN_CHUNK_BYTES = 1024
MAX_CHUNK_BYTES = 64 * 1024 * 1024
"""A chunk is held in memory while it is verified."""
MAX_TENSORS = 100_000
MAX_OBJECT_BYTES = 1 << 42
_MIB = 1024 * 1024
MAX_INTEGER = 2**53 - 1
"""Versions and incarnations stay exact in every JSON reader."""

FLOATING = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
_FLOATING_NAMES = frozenset({*FLOATING.values(), "F8_E5M2", "F8_E4M3"})
MIXED = "mixed"
"""Declared element type of a model whose floating tensors differ in theirs."""

_HASH = re.compile(r"[0-9a-f]{64}")
_DECODER = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """The JSON that is signed and stored; same manifest → same bytes."""
    return msgspec.json.encode(manifest)


def parse_manifest(data: bytes) -> Manifest:
    """Raises IntegrityError, in one sentence, for anything that is not a consistent manifest within the limits."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, got {len(data)}")
    try:
        manifest = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"the manifest could not be read: {error}") from None
    _check_identity(manifest)
    _check_chunks(manifest)
    _check_tensors(manifest)
    return manifest


def chunk_size_for(object_size: int) -> int:
    """Chunk of a wire object in bytes: small enough that a hop of a chain adds little to the whole transfer."""
    if object_size <= 32 * _MIB:
        return 128 * 1024
    return 256 * 1024 if object_size <= 512 * _MIB else _MIB


def wire_limit_bytes(raw_bytes: int) -> int:
    """No encoded object of a snapshot of ``raw_bytes`` is larger: what does not compress is stored as it is."""
    return raw_bytes + raw_bytes // 256 + 4096


def roots_of(tensors: Iterable[TensorEntry]) -> str:
    """Decoded root: blake3 over (name, dtype, shape, blake3 of the bytes) of the tensors by name.

    It depends on the tensors alone, not on how an object packs them, so it is the same after any path.
    """
    rows = [(t.name, t.dtype, t.shape, t.blake3) for t in sorted(tensors, key=lambda t: t.name)]
    return blake3(msgspec.json.encode(rows)).hexdigest()


def policy_dtype(dtype: str, tensors: Sequence[TensorShape]) -> None:
    """Raises IntegrityError unless every floating tensor has the declared element type (E12)."""
    if dtype == MIXED:
        return
    if dtype not in FLOATING:
        raise IntegrityError(f"a policy's dtype must be one of {', '.join(FLOATING)} or {MIXED}, got {dtype[:32]!r}")
    for tensor in tensors:
        if tensor.dtype in _FLOATING_NAMES and tensor.dtype != FLOATING[dtype]:
            raise IntegrityError(
                f"tensor {tensor.name!r} is {tensor.dtype} in a policy declared {dtype}; cast it to {FLOATING[dtype]}"
            )


def _check_identity(manifest: Manifest) -> None:
    policies = [manifest.policy] if manifest.base is None else [manifest.policy, manifest.base]
    for policy in policies:
        if not (0 <= policy.incarnation <= MAX_INTEGER and 0 <= policy.version <= MAX_INTEGER):
            raise IntegrityError(f"a policy is two integers in [0, {MAX_INTEGER}], got {policy}")
    if len(manifest.run_id) > MAX_NAME_CHARACTERS:
        raise IntegrityError(f"run_id has at most {MAX_NAME_CHARACTERS} characters, got {len(manifest.run_id)}")
    _check_codec(manifest)
    for root in (manifest.object_root, manifest.decoded_root, *manifest.chunks, *(t.blake3 for t in manifest.tensors)):
        if not _HASH.fullmatch(root):
            raise IntegrityError(f"a blake3 hash is 64 lower-case hexadecimal digits, got {root[:80]!r}")


def _check_codec(manifest: Manifest) -> None:
    if manifest.codec not in _CODECS.get(manifest.kind, ()):
        raise IntegrityError(
            "this version reads anchors of codec raw or planes and deltas of codec delta or lora, "
            f"got {manifest.kind.value} of codec {manifest.codec[:32]!r}"
        )
    if manifest.kind is SnapshotKind.ANCHOR:
        if manifest.base is not None or manifest.base_root:
            raise IntegrityError("an anchor has no base")
    elif manifest.base is None or not _HASH.fullmatch(manifest.base_root):
        raise IntegrityError("a delta must name its base and the base's decoded root")
    elif manifest.base >= manifest.policy:
        raise IntegrityError(f"a delta's base must be older than its policy {manifest.policy}, got {manifest.base}")


def _check_chunks(manifest: Manifest) -> None:
    size, chunk = manifest.object_size, manifest.chunk_size
    if not 0 < size <= MAX_OBJECT_BYTES:
        raise IntegrityError(f"object_size must be in [1, {MAX_OBJECT_BYTES}], got {size}")
    if not MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES:
        raise IntegrityError(f"chunk_size must be in [{MIN_CHUNK_BYTES}, {MAX_CHUNK_BYTES}], got {chunk}")
    count = -(-size // chunk)
    if len(manifest.chunks) != count:
        raise IntegrityError(f"{size} bytes in chunks of {chunk} make {count} chunks, got {len(manifest.chunks)}")


def _check_tensors(manifest: Manifest) -> None:
    if len(manifest.tensors) > MAX_TENSORS or len(manifest.aliases) > MAX_TENSORS:
        raise IntegrityError(f"a snapshot has at most {MAX_TENSORS} tensors and aliases")
    shapes = [check_tensor(t.name, t.dtype, t.shape) for t in manifest.tensors]
    for entry, shape in zip(manifest.tensors, shapes, strict=True):
        if entry.nbytes != shape.nbytes:
            raise IntegrityError(f"tensor {entry.name!r} must have {shape.nbytes} bytes, got {entry.nbytes}")
    names = {shape.name for shape in shapes}
    if len(names) != len(shapes):
        raise IntegrityError("tensor names must differ from each other")
    for alias, stored in manifest.aliases.items():
        if alias in names or stored not in names or not 0 < len(alias) <= MAX_NAME_CHARACTERS:
            raise IntegrityError(f"alias {alias[:80]!r} must be a new name for a stored tensor, got {stored[:80]!r}")
    policy_dtype(manifest.dtype, shapes)
    if roots_of(manifest.tensors) != manifest.decoded_root:
        raise IntegrityError("decoded_root does not follow from the tensors")
    raw_bytes = len(header_bytes(shapes)) + sum(shape.nbytes for shape in shapes)
    if raw_bytes > MAX_OBJECT_BYTES:
        raise IntegrityError(f"a snapshot has at most {MAX_OBJECT_BYTES} bytes, its tensors take {raw_bytes}")
    if manifest.codec == RAW and raw_bytes != manifest.object_size:
        raise IntegrityError(f"header and tensors take {raw_bytes} bytes, object_size says {manifest.object_size}")
    if manifest.object_size > wire_limit_bytes(raw_bytes):
        raise IntegrityError(
            f"an object of codec {manifest.codec} has at most {wire_limit_bytes(raw_bytes)} bytes here, "
            f"object_size says {manifest.object_size}"
        )
