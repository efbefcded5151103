"""A snapshot on disk: one safetensors object and the manifest that describes it.

Invariant (I6): a folder that has a manifest has the whole object; the manifest came last. The object's header is not
read but computed: from a manifest's tensors follows exactly one header, and any other is refused, so no header that
came over the network is ever parsed (E04).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from echo2.broadcast.layout import Span, check_tensor, header_bytes, object_order, spans_of
from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.broadcast.parse import encode_manifest, parse_manifest, policy_dtype, roots_of
from echo2.durable import publish_folder, room_for, write_all, write_file
from echo2.errors import IntegrityError
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME, PARTIAL
from echo2.types import Policy, SnapshotKind

CHUNK_BYTES = 1024 * 1024
"""Unit of hashing and of resumed transfers: 16,000 chunks for 16 GB, and at most 1 MiB fetched again."""

_WORTH_THREADS_BYTES = 256 * 1024
_OTHER_CORES = ThreadPoolExecutor(3, "hashing")
"""A snapshot's bytes are hashed three times; one after the other that takes longer than a delta's transfer."""
Work = Callable[[], object]

_NUMPY_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "int32": "I32",
    "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64",
}  # fmt: skip


class RawTensor(msgspec.Struct, frozen=True):
    """A tensor as its little-endian, row-major bytes; the element type may be one that numpy lacks (BF16)."""

    dtype: str
    """safetensors name."""
    shape: tuple[int, ...]
    data: memoryview
    """[nbytes] contiguous, of format ``B``."""

    @classmethod
    def of(cls, array: NDArray[np.generic], dtype: str = "") -> Self:
        """Example: ``RawTensor.of(bits, "BF16")`` for bfloat16 bits as uint16; numpy's own types need no name."""
        plain = np.ascontiguousarray(array).reshape(array.shape)
        plain = plain.astype(plain.dtype.newbyteorder("<"), copy=False)
        return cls(dtype or _NUMPY_NAMES[plain.dtype.name], array.shape, plain.reshape(-1).view(np.uint8).data)

    def read(self) -> memoryview:
        return self.data


class StreamedTensor(msgspec.Struct, frozen=True):
    """A tensor whose bytes are made when they are written."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]


def write_snapshot(
    tensors: Mapping[str, RawTensor | StreamedTensor],
    aliases: Mapping[str, str],
    *,
    run_id: str,
    policy: Policy,
    dtype: str,
    folder: Path,
    chunk_size: int = CHUNK_BYTES,
) -> Manifest:
    """Write ``folder``/model.safetensors, then its manifest; return the manifest. Same tensors → same bytes.

    aliases: tied tensors, name → name of the stored tensor; they take no bytes.
    dtype: the policy's element type (``bfloat16`` …); every floating tensor must have it (E12), or ``mixed``.

    Whole or absent: everything is written beside ``folder`` and renamed; what an interrupted earlier attempt left is
    overwritten. Raises IntegrityError for tensors that do not fit their description, DiskFull.
    """
    shapes = [check_tensor(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    policy_dtype(dtype, shapes)
    unfinished = folder.with_name(folder.name + PARTIAL)
    with room_for(folder):
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / MANIFEST_NAME).unlink(missing_ok=True)
        entries: list[TensorEntry] = []
        with ObjectWriter(unfinished / OBJECT_NAME, chunk_size) as writer:
            writer.write(header_bytes(shapes))
            for shape in object_order(shapes):
                data = tensors[shape.name].read()
                if data.nbytes != shape.nbytes:
                    raise IntegrityError(f"tensor {shape.name!r} must have {shape.nbytes} bytes, got {data.nbytes}")
                digest = writer.write(data)
                entries.append(TensorEntry(shape.name, shape.dtype, shape.shape, shape.nbytes, digest))
            writer.sync()
    manifest = writer.manifest(entries, aliases, run_id, policy, dtype)
    write_file(unfinished / MANIFEST_NAME, encode_manifest(manifest))
    publish_folder(unfinished, folder)
    return manifest


class ObjectWriter:
    """Writes an object once, front to back, hashing tensors, chunks and the whole on the way."""

    def __init__(self, path: Path, chunk_size: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._hashes = ObjectHashes(chunk_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> str:
        """Append the bytes; return their blake3."""
        view = memoryview(data)
        return self.write_blocks(view[i : i + CHUNK_BYTES] for i in range(0, len(view), CHUNK_BYTES))

    def write_blocks(self, blocks: Iterable[bytes | memoryview]) -> str:
        """Append blocks that together are one tensor; return their blake3."""
        own = blake3()
        for block in blocks:
            self.append(block, partial(own.update, block))
        return own.hexdigest()

    def append(self, block: bytes | memoryview, *also: Work) -> None:
        """Append the bytes; ``also`` is done with them meanwhile."""
        self._hashes.update(memoryview(block), partial(write_all, self._descriptor, block), *also)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def manifest(
        self, entries: list[TensorEntry], aliases: Mapping[str, str], run_id: str, policy: Policy, dtype: str
    ) -> Manifest:
        """Describe what was written; the result obeys every rule that ``parse_manifest`` checks."""
        return parse_manifest(
            encode_manifest(
                Manifest(
                    run_id=run_id,
                    policy=policy,
                    kind=SnapshotKind.ANCHOR,
                    base=None,
                    base_root="",
                    codec="raw",
                    object_size=self._hashes.size,
                    object_root=self._hashes.root(),
                    chunk_size=self._hashes.chunk_size,
                    chunks=self._hashes.chunks(),
                    decoded_root=roots_of(entries),
                    tensors=tuple(sorted(entries, key=lambda e: e.name)),
                    aliases=dict(sorted(aliases.items())),
                    dtype=dtype,
                )
            )
        )


class ObjectHashes:
    """Root and chunk hashes of bytes that come in blocks of any size."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.size = 0
        self._root = blake3()
        self._chunk = blake3()
        self._chunks: list[str] = []

    def update(self, block: memoryview, *also: Work) -> None:
        """Take the next bytes; ``also`` is done meanwhile, on other cores where the block is worth it."""
        works: list[Work] = [partial(self._root.update, block), partial(self._add_to_chunks, block), *also]
        if len(block) < _WORTH_THREADS_BYTES:
            for work in works:
                work()
        else:
            side_by_side(*works)

    def _add_to_chunks(self, block: memoryview) -> None:
        while block:
            part = block[: self.chunk_size - self.size % self.chunk_size]
            self._chunk.update(part)
            self.size += len(part)
            block = block[len(part) :]
            if self.size % self.chunk_size == 0:
                self._chunks.append(self._chunk.hexdigest())
                self._chunk = blake3()

    def root(self) -> str:
        return self._root.hexdigest()

    def chunks(self) -> tuple[str, ...]:
        return (*self._chunks, self._chunk.hexdigest()) if self.size % self.chunk_size else tuple(self._chunks)


def side_by_side(first: Work, *others: Work) -> None:
    """Do all of it at once, ``first`` in this thread; return when all is done. Raises what one of them raised."""
    started = [_OTHER_CORES.submit(other) for other in others]
    try:
        first()
    finally:
        wait(started)
    for other in started:
        other.result()


def load_manifest(folder: Path) -> Manifest:
    """Raises IntegrityError when the folder holds no (right) manifest."""
    try:
        data = (folder / MANIFEST_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise IntegrityError(f"{folder} is no complete snapshot: it has no {MANIFEST_NAME}") from None
    return parse_manifest(data)


def verify_snapshot(folder: Path, manifest: Manifest) -> None:
    """Compare all bytes of the object with the manifest: size, header, tensors, chunks, root. Raises IntegrityError."""
    path = folder / OBJECT_NAME
    where = f"snapshot {manifest.policy} in {folder}"
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        raise IntegrityError(f"{where} has no {OBJECT_NAME}") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != manifest.object_size:
            raise IntegrityError(f"{where} must have {manifest.object_size} bytes, got {size}")
        hashes = ObjectHashes(manifest.chunk_size)
        spans = spans_of_manifest(manifest)
        digests = {entry.name: entry.blake3 for entry in manifest.tensors}
        header = header_bytes(span.tensor for span in spans)
        if _read_hashed(file.fileno(), len(header), hashes) != blake3(header).hexdigest():
            raise IntegrityError(f"{where}: the header is not the one its tensors have")
        for span in spans:
            if _read_hashed(file.fileno(), span.tensor.nbytes, hashes) != digests[span.tensor.name]:
                raise IntegrityError(f"{where}: tensor {span.tensor.name!r} is not what the manifest says")
    if hashes.chunks() != manifest.chunks or hashes.root() != manifest.object_root:
        raise IntegrityError(f"{where}: chunk hashes or object root differ from the manifest")


def spans_of_manifest(manifest: Manifest) -> list[Span]:
    """Where each tensor lies in the object, in object order."""
    return spans_of(check_tensor(t.name, t.dtype, t.shape) for t in manifest.tensors)


def read_tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    """(name, dtype, shape, bytes) of each stored tensor, mapped from the file, in object order. Verify first.

    Aliases are not repeated: ``manifest.aliases`` says which names share these tensors.
    """
    with (folder / OBJECT_NAME).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != manifest.object_size:
            raise IntegrityError(f"snapshot in {folder} must have {manifest.object_size} bytes, got {size}")
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    for span in spans_of_manifest(manifest):
        tensor = span.tensor
        yield tensor.name, tensor.dtype, tensor.shape, view[span.start : span.start + tensor.nbytes]


def _read_hashed(descriptor: int, length: int, hashes: ObjectHashes) -> str:
    """blake3 of the next ``length`` bytes, which also pass through ``hashes``."""
    own = blake3()
    while length:
        block = os.read(descriptor, min(CHUNK_BYTES, length))
        if not block:
            break
        hashes.update(memoryview(block), partial(own.update, block))
        length -= len(block)
    return own.hexdigest()


__all__ = [
    "CHUNK_BYTES",
    "ObjectHashes",
    "ObjectWriter",
    "RawTensor",
    "StreamedTensor",
    "encode_manifest",
    "load_manifest",
    "parse_manifest",
    "read_tensors",
    "spans_of_manifest",
    "verify_snapshot",
    "write_snapshot",
]
