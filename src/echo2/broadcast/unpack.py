"""Wire objects back into raw snapshot folders.

Invariant (I6): a folder made here holds exactly the weights of its manifest: each tensor's hash is compared with it
before the folder gets its name, and the base was the one that the delta names. Whatever goes wrong, it is absent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from echo2.broadcast import delta, lora, planes
from echo2.broadcast.body import Body, Contents, Piece, contents_of, open_snapshot, page_aligned
from echo2.broadcast.checking import TensorHashes, entries_in_order
from echo2.broadcast.layout import header_bytes
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import LORA, PLANES, RAW, encode_manifest
from echo2.broadcast.places import beside, made_in
from echo2.broadcast.planes import shapes_of
from echo2.broadcast.snapshot import CHUNK_BYTES, ObjectWriter
from echo2.broadcast.wire import ObjectReader
from echo2.durable import ASIDE, publish_folder, write_file
from echo2.errors import DiskFull, IntegrityError
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME
from echo2.types import SnapshotKind


def unpack(
    manifest: Manifest,
    object_path: Path,
    base_folder: Path | None,
    folder: Path,
    beside: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Make raw snapshot ``folder`` of the object at ``object_path``; return its manifest, as ``write_snapshot`` would.

    base_folder: the raw snapshot that a delta applies to; an anchor needs none.  beside: small files of the folder,
    by name.
    Whole or absent: works in ``folder``.unpacked.aside and renames it. Raises IntegrityError when the base is not the
    named one (before anything is written), the object is broken, or the result is not what the manifest says; DiskFull.
    """
    with ExitStack() as stack:
        base = open_snapshot(base_folder) if base_folder is not None else None
        if base is not None:
            stack.enter_context(base.body)
        check_base(manifest, base.contents if base is not None else None)
        aside = stack.enter_context(unfinished(folder))
        raw = rebuild(manifest, object_path, base.body if base is not None else None, aside)
        for name, data in (beside or {}).items():
            write_file(aside / name, data)  # if there is no room for it, the rest shall not stay either
        publish_folder(aside, folder)
    return raw


def check_base(manifest: Manifest, base: Contents | None) -> None:
    """Raises IntegrityError unless ``base`` is the one that a delta names; an anchor asks for none."""
    if manifest.kind is not SnapshotKind.DELTA:
        return
    wanted = f"the delta to {manifest.policy} applies to {manifest.base} of decoded root {manifest.base_root[:16]}…"
    if base is None:
        raise IntegrityError(f"{wanted}; give that base")
    if base.decoded_root != manifest.base_root:
        raise IntegrityError(f"{wanted}, got a base of decoded root {base.decoded_root[:16]}…")
    if not base.fit(contents_of(manifest)):
        raise IntegrityError(f"{wanted}, whose tensors have other names, types or shapes than the result's")


def unfinished(folder: Path) -> AbstractContextManager[Path]:
    """An empty folder beside ``folder`` to make it in; whatever goes wrong, it is removed."""
    return made_in(unfinished_name(folder), folder)


def unfinished_name(folder: Path) -> Path:
    return beside(folder, ".unpacked" + ASIDE)


def rebuild(manifest: Manifest, object_path: Path, base: Body | None, into: Path, *, start: int = 0) -> Manifest:
    """Write raw object and manifest into folder ``into``; the base was checked, the result is checked here.

    start: where in its file the object begins. Raises IntegrityError, DiskFull.
    """
    entries = entries_in_order(contents_of(manifest))
    header = header_bytes(shapes_of(contents_of(manifest)))
    _check_room(into, len(header) + sum(entry.nbytes for entry in entries))
    hashes = TensorHashes(entries, _not_as_said)
    with ExitStack() as stack:
        blocks = _blocks(manifest, object_path, start, base, stack)
        writer = stack.enter_context(ObjectWriter(into / OBJECT_NAME, CHUNK_BYTES))
        writer.append(header)
        for block in blocks:
            writer.append(block, partial(hashes.update, block))
        hashes.end()
        writer.sync()
    raw = writer.manifest(entries, manifest.aliases, manifest.run_id, manifest.policy, manifest.dtype)
    write_file(into / MANIFEST_NAME, encode_manifest(raw))
    return raw


def _blocks(
    manifest: Manifest, object_path: Path, start: int, base: Body | None, stack: ExitStack
) -> Iterator[memoryview]:
    """The body that the object decodes to; what it opens is closed by ``stack``."""
    contents, size = contents_of(manifest), manifest.object_size
    if manifest.codec == RAW:
        body = stack.enter_context(Body([Piece(object_path, start, size)]))
        return _raw_blocks(body, header_bytes(shapes_of(contents)))
    if manifest.codec == PLANES:
        reader = stack.enter_context(ObjectReader(object_path, size, planes.MAGIC, start))
        return planes.decode_anchor(reader, contents)
    assert base is not None, "check_base comes first"
    if manifest.codec == LORA:
        return lora.decode_lora(lora.read_adapters(object_path, size, start), contents, base)
    reader = stack.enter_context(ObjectReader(object_path, size, delta.MAGIC, start))
    return delta.decode_delta(reader, contents, base)


def _raw_blocks(file: Body, header: bytes) -> Iterator[memoryview]:
    found = bytearray(len(header))
    file.read(0, memoryview(found))
    if found != header:
        raise IntegrityError("the raw object's header is not the one its tensors have")
    buffer = page_aligned(CHUNK_BYTES).data
    for at in range(len(header), file.nbytes, CHUNK_BYTES):
        block = buffer[: file.nbytes - at]
        file.read(at, block)
        yield block


def _not_as_said(name: str) -> str:
    return f"tensor {name!r} did not become what the manifest says: the object or its base is damaged"


def _check_room(folder: Path, wanted_bytes: int) -> None:
    """Raises DiskFull at once rather than after most of it was written."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < wanted_bytes:
        raise DiskFull(f"{folder} must have room for {wanted_bytes} bytes, its disk has {free_bytes}; free space there")
