"""Model directories as snapshots, for ``echo2 snapshot pack | verify``.

Invariant: packing changes no tensor's bytes; the packed folder is again a Hugging Face directory (one
``model.safetensors``, the small files beside it) and also a snapshot that ``verify_directory`` checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from echo2.broadcast.body import Body, Contents, Piece, Weights, contents_of, open_snapshot
from echo2.broadcast.layout import (
    MAX_NAME_CHARACTERS,
    TensorShape,
    header_bytes,
    header_length,
    object_order,
    parse_header,
)
from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.broadcast.parse import FLOATING, MIXED, encode_manifest, roots_of
from echo2.broadcast.places import beside, check_free, made_in, users_paths
from echo2.broadcast.planes import shapes_of
from echo2.broadcast.snapshot import CHUNK_BYTES, ObjectWriter, load_manifest, verify_snapshot
from echo2.durable import publish_folder, write_file
from echo2.errors import IntegrityError, UserError
from echo2.transport.assets import MAX_ASSET_BYTES, MAX_ASSETS, is_asset_name
from echo2.transport.model_folder import ASSET_SUFFIXES, CONFIG_NAME, INDEX_NAME, own_file, weight_files
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME, PARTIAL
from echo2.types import Policy

FIRST_POLICY = Policy(0, 0)

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class _Stored(msgspec.Struct, frozen=True):
    """A tensor in one of the source files."""

    tensor: TensorShape
    piece: Piece


class _Model(NamedTuple):
    """A Hugging Face directory as a snapshot would hold it."""

    stored: list[_Stored]
    """In object order, tied ones left out."""
    aliases: dict[str, str]
    dtype: str


@users_paths()
def pack_directory(source: Path, out: Path, *, run_id: str = "packed", policy: Policy = FIRST_POLICY) -> Manifest:
    """Make snapshot ``out`` of a Hugging Face directory of safetensors, sharded or not; return its manifest.

    Tied tensors are stored once and listed in ``manifest.aliases``. The directory's small files (``asset_files``) are
    copied along. Whole or absent: it is made beside ``out`` and renamed. Raises UserError when ``source`` is no such
    directory or broken, or ``out`` exists, IntegrityError when it is a damaged snapshot, DiskFull.
    """
    partial = beside(out, PARTIAL)
    check_free(out, folder=partial)
    model, assets = _model_in(source), asset_files(source)
    with made_in(partial, out):
        with ObjectWriter(partial / OBJECT_NAME, CHUNK_BYTES) as writer:
            writer.write(header_bytes(stored.tensor for stored in model.stored))
            entries = [_entry(stored.tensor, writer.write_blocks(_blocks(stored.piece))) for stored in model.stored]
            writer.sync()
        _check_told(source, entries)
        for path in assets:
            write_file(partial / path.name, path.read_bytes())
        manifest = writer.manifest(entries, model.aliases, run_id, policy, model.dtype)
        write_file(partial / MANIFEST_NAME, encode_manifest(manifest))
        publish_folder(partial, out)
    return manifest


def open_weights(source: Path) -> Weights:
    """A snapshot folder, or a Hugging Face directory as the snapshot that it would pack to; the latter is hashed.

    Of a snapshot only the size and the header are compared with its manifest here; ``CheckedBody`` compares the rest
    while it is read. Raises UserError when it is neither or a broken model, IntegrityError for a damaged snapshot.
    """
    if (source / MANIFEST_NAME).is_file():
        _check_header(source)
        return open_snapshot(source)
    model = _model_in(source)
    entries = [_entry(stored.tensor, _digest(stored.piece)) for stored in model.stored]
    tensors = tuple(sorted(entries, key=lambda entry: entry.name))
    contents = Contents("packed", FIRST_POLICY, roots_of(tensors), tensors, model.aliases, model.dtype)
    return Weights(contents, Body(stored.piece for stored in model.stored))


@users_paths()
def verify_directory(folder: Path) -> Manifest:
    """Check a snapshot folder byte for byte and return its manifest. Raises UserError, IntegrityError."""
    if not folder.is_dir():
        raise UserError(f"{folder} must be a snapshot's folder; there is no such directory")
    if not (folder / MANIFEST_NAME).is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}"))
        cure = f"give one of those in it, such as {inside[-1]}" if inside else "pack a model into it first"
        raise UserError(f"{folder} must be a snapshot's folder; it has no {MANIFEST_NAME}: {cure}")
    manifest = load_manifest(folder)
    verify_snapshot(folder, manifest)
    return manifest


def asset_files(folder: Path) -> list[Path]:
    """The small files of a model directory that workers need beside weights, by name.

    Raises UserError when one is a link out of the directory.
    """
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in ASSET_SUFFIXES
        and path.name not in (INDEX_NAME, MANIFEST_NAME)
        and is_asset_name(path.name)
        and own_file(folder, path.name) is not None
        and path.stat().st_size <= MAX_ASSET_BYTES
    ][:MAX_ASSETS]


def _model_in(source: Path) -> _Model:
    stored, metadata = _tensors_of(source)
    aliases = _ties(source, stored, metadata)
    shapes = object_order(stored[name].tensor for name in stored if name not in aliases)
    kinds = {shape.dtype for shape in shapes if shape.dtype.startswith(("F", "BF"))}
    declared = [word for word, name in FLOATING.items() if kinds == {name}]
    return _Model([stored[shape.name] for shape in shapes], aliases, declared[0] if declared else MIXED)


def _entry(shape: TensorShape, digest: str) -> TensorEntry:
    return TensorEntry(shape.name, shape.dtype, shape.shape, shape.nbytes, digest)


def _tensors_of(source: Path) -> tuple[dict[str, _Stored], dict[str, str]]:
    if not source.is_dir():
        raise UserError(f"{source} must be a model directory; there is no such directory")
    stored: dict[str, _Stored] = {}
    metadata: dict[str, str] = {}
    for file in weight_files(source):
        size = file.stat().st_size
        try:
            with file.open("rb") as opened:
                length = header_length(opened.read(8), size)
                spans, found = parse_header(opened.read(length), size)
        except IntegrityError as error:
            raise UserError(f"{file}: {error}; copy or download it again") from None
        metadata |= found
        for span in spans:
            if (other := stored.get(span.tensor.name)) is not None:
                raise UserError(
                    f"a tensor must be in one file, {span.tensor.name!r} is in {other.piece.file} and in {file}; "
                    "save the model again"
                )
            stored[span.tensor.name] = _Stored(span.tensor, Piece(file, span.start, span.tensor.nbytes))
    return stored, metadata


def _check_told(source: Path, entries: Iterable[TensorEntry]) -> None:
    """A snapshot is not packed again over its damage. Raises IntegrityError."""
    try:
        told = {entry.name: entry.blake3 for entry in load_manifest(source).tensors}
    except IntegrityError:
        return  # no snapshot: the name is a common one
    for entry in entries:
        if told.get(entry.name, entry.blake3) != entry.blake3:
            raise IntegrityError(
                f"{source}: tensor {entry.name!r} is not what {MANIFEST_NAME} there says; make the snapshot again, or "
                f"remove {MANIFEST_NAME} if the weights were changed on purpose"
            )


def _check_header(snapshot: Path) -> None:
    """Raises IntegrityError unless the snapshot's object begins with the one header that its tensors have."""
    header = header_bytes(shapes_of(contents_of(load_manifest(snapshot))))
    try:
        with (snapshot / OBJECT_NAME).open("rb") as file:
            found = file.read(len(header))
    except FileNotFoundError:
        raise IntegrityError(f"{snapshot} is no complete snapshot: it has no {OBJECT_NAME}") from None
    if found != header:
        raise IntegrityError(f"{snapshot / OBJECT_NAME}: the header is not the one its tensors have; make it again")


def _ties(source: Path, stored: dict[str, _Stored], metadata: dict[str, str]) -> dict[str, str]:
    """Tied tensors, name → stored name: from the files' metadata, and the head where the configuration ties it.

    A head that is stored and differs from the embedding is kept as it is, whatever the configuration says.
    """
    ties = {
        name: kept
        for name, kept in metadata.items()
        if kept in stored and name not in stored and 0 < len(name) <= MAX_NAME_CHARACTERS
    }
    config = own_file(source, CONFIG_NAME)
    try:
        tied = config is not None and json.loads(config.read_bytes()).get("tie_word_embeddings") is True
    except (ValueError, AttributeError, RecursionError):
        tied = False
    if tied and _EMBEDDING in stored:
        head = stored.get(_HEAD)
        same_size = head is not None and head.piece.nbytes == stored[_EMBEDDING].piece.nbytes
        if head is None or (same_size and _digest(head.piece) == _digest(stored[_EMBEDDING].piece)):
            ties[_HEAD] = _EMBEDDING
    return ties


def _blocks(piece: Piece) -> Iterator[memoryview]:
    """The piece's bytes; a block is valid until the next is asked for."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, piece.nbytes)))
    with Body([piece]) as body:
        for start in range(0, piece.nbytes, CHUNK_BYTES):
            block = buffer[: piece.nbytes - start]
            body.read(start, block)
            yield block


def _digest(piece: Piece) -> str:
    digest = blake3()
    for block in _blocks(piece):
        digest.update(block)
    return digest.hexdigest()
