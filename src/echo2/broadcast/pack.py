"""Model directories as snapshots, for ``echo2 snapshot pack | verify``.

Invariant: packing changes no tensor's bytes; the packed folder is again a Hugging Face directory (one
``model.safetensors``, the small files beside it) and also a snapshot that ``verify_directory`` checks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from echo2.broadcast.body import Body, Contents, Piece, Weights, open_snapshot
from echo2.broadcast.layout import TensorShape, header_bytes, header_length, object_order, parse_header
from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.broadcast.parse import FLOATING, MIXED, encode_manifest, roots_of
from echo2.broadcast.snapshot import CHUNK_BYTES, ObjectWriter, load_manifest, verify_snapshot
from echo2.durable import publish_folder, room_for, write_file
from echo2.errors import IntegrityError, UserError
from echo2.transport.assets import MAX_ASSET_BYTES, MAX_ASSETS, is_asset_name
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME, PARTIAL
from echo2.types import Policy

INDEX_NAME = "model.safetensors.index.json"
ASSET_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Configuration, tokenizer, chat template, vocabulary."""
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


def pack_directory(source: Path, out: Path, *, run_id: str = "packed", policy: Policy = FIRST_POLICY) -> Manifest:
    """Make snapshot ``out`` of a Hugging Face directory of safetensors, sharded or not; return its manifest.

    Tied tensors are stored once and listed in ``manifest.aliases``. The directory's small files (``asset_files``) are
    copied along. Raises UserError when ``source`` is no such directory or ``out`` exists, IntegrityError for a broken
    file, DiskFull.
    """
    if out.exists():
        raise UserError(f"{out} must not exist yet; choose another folder or remove it")
    model = _model_in(source)
    partial = out.with_name(out.name + PARTIAL)
    with room_for(out):
        shutil.rmtree(partial, ignore_errors=True)  # what an earlier attempt left
        partial.mkdir(parents=True)
        with ObjectWriter(partial / OBJECT_NAME, CHUNK_BYTES) as writer:
            writer.write(header_bytes(stored.tensor for stored in model.stored))
            entries = [_entry(stored.tensor, writer.write_blocks(_blocks(stored.piece))) for stored in model.stored]
            writer.sync()
    for path in asset_files(source):
        write_file(partial / path.name, path.read_bytes())
    manifest = writer.manifest(entries, model.aliases, run_id, policy, model.dtype)
    write_file(partial / MANIFEST_NAME, encode_manifest(manifest))
    publish_folder(partial, out)
    return manifest


def open_weights(source: Path) -> Weights:
    """A snapshot folder, or a Hugging Face directory as the snapshot that it would pack to; the latter is hashed.

    Raises UserError when it is neither, IntegrityError for broken files.
    """
    if (source / MANIFEST_NAME).is_file():
        return open_snapshot(source)
    model = _model_in(source)
    entries = [_entry(stored.tensor, _digest(stored.piece)) for stored in model.stored]
    tensors = tuple(sorted(entries, key=lambda entry: entry.name))
    contents = Contents("packed", FIRST_POLICY, roots_of(tensors), tensors, model.aliases, model.dtype)
    return Weights(contents, Body(stored.piece for stored in model.stored))


def verify_directory(folder: Path) -> Manifest:
    """Check a snapshot folder byte for byte and return its manifest. Raises UserError, IntegrityError."""
    if not folder.is_dir():
        raise UserError(f"{folder} must be a snapshot's folder; there is no such directory")
    if not (folder / MANIFEST_NAME).is_file():
        raise UserError(f"{folder} must be a snapshot's folder; it has no {MANIFEST_NAME}: pack a model into it first")
    manifest = load_manifest(folder)
    verify_snapshot(folder, manifest)
    return manifest


def asset_files(folder: Path) -> list[Path]:
    """The small files of a model directory that workers need beside weights, by name."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in ASSET_SUFFIXES
        and path.name not in (INDEX_NAME, MANIFEST_NAME)
        and is_asset_name(path.name)
        and path.is_file()
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
    for file in _files_of(source):
        size = file.stat().st_size
        try:
            with file.open("rb") as opened:
                length = header_length(opened.read(8), size)
                spans, found = parse_header(opened.read(length), size)
        except IntegrityError as error:
            raise IntegrityError(f"{file}: {error}") from None
        metadata |= found
        for span in spans:
            if (other := stored.get(span.tensor.name)) is not None:
                raise IntegrityError(f"tensor {span.tensor.name!r} is in {other.piece.file} and in {file}")
            stored[span.tensor.name] = _Stored(span.tensor, Piece(file, span.start, span.tensor.nbytes))
    return stored, metadata


def _files_of(source: Path) -> list[Path]:
    if (source / INDEX_NAME).is_file():
        try:
            names = sorted(set(json.loads((source / INDEX_NAME).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise IntegrityError(f"{source / INDEX_NAME} must hold a JSON object with a weight_map") from None
    elif (source / OBJECT_NAME).is_file():
        names = [OBJECT_NAME]
    else:
        raise UserError(f"{source} must hold {OBJECT_NAME} or {INDEX_NAME}; convert the weights to safetensors first")
    return [_file_in(source, name) for name in names]


def _file_in(source: Path, name: object) -> Path:
    """``source``/``name`` for a plain name that stays in the directory (or in its hub cache). Raises IntegrityError."""
    if not isinstance(name, str) or not is_asset_name(name) or not name.endswith(".safetensors"):
        raise IntegrityError(f"{source / INDEX_NAME} must name safetensors files beside it, got {str(name)[:80]!r}")
    home = source.resolve()
    target = (source / name).resolve()
    # A hub cache links snapshots/<revision>/<name> to ../../blobs/<hash>; no other way out of the folder is taken.
    if target.parent not in (home, home.parent.parent / "blobs"):
        raise IntegrityError(f"{source / name} must not lead out of its directory, it leads to {target}")
    if not target.is_file():
        raise IntegrityError(f"{source / name} is named by the index and missing")
    return target


def _ties(source: Path, stored: dict[str, _Stored], metadata: dict[str, str]) -> dict[str, str]:
    """Tied tensors, name → stored name: from the files' metadata, and the head where the configuration ties it.

    A head that is stored and differs from the embedding is kept as it is, whatever the configuration says.
    """
    ties = {name: kept for name, kept in metadata.items() if kept in stored and name not in stored}
    try:
        tied = json.loads((source / "config.json").read_bytes()).get("tie_word_embeddings") is True
    except (OSError, ValueError, AttributeError):
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
