"""Model directories as snapshots, for ``echo2 snapshot pack | verify``.

Invariant: packing changes no tensor's bytes; the packed folder is again a Hugging Face directory (one
``model.safetensors``, the small files beside it) and also a snapshot that ``verify_directory`` checks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from echo2.broadcast.layout import Span, header_bytes, header_length, object_order, parse_header
from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.broadcast.parse import FLOATING, MIXED, encode_manifest
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

    file: Path
    span: Span


def pack_directory(source: Path, out: Path, *, run_id: str = "packed", policy: Policy = FIRST_POLICY) -> Manifest:
    """Make snapshot ``out`` of a Hugging Face directory of safetensors, sharded or not; return its manifest.

    Tied tensors are stored once and listed in ``manifest.aliases``. The directory's small files (``asset_files``) are
    copied along. Raises UserError when ``source`` is no such directory or ``out`` exists, IntegrityError for a broken
    file, DiskFull.
    """
    if out.exists():
        raise UserError(f"{out} must not exist yet; choose another folder or remove it")
    stored, metadata = _tensors_of(source)
    aliases = _ties(source, stored, metadata)
    shapes = [stored[name].span.tensor for name in stored if name not in aliases]
    kinds = {s.dtype for s in shapes if s.dtype.startswith(("F", "BF"))}
    declared = [word for word, name in FLOATING.items() if kinds == {name}]
    partial = out.with_name(out.name + PARTIAL)
    with room_for(out):
        partial.mkdir(parents=True, exist_ok=True)
        entries = []
        with ObjectWriter(partial / OBJECT_NAME, CHUNK_BYTES) as writer:
            writer.write(header_bytes(shapes))
            for shape in object_order(shapes):
                digest = writer.write_blocks(_blocks(stored[shape.name]))
                entries.append(TensorEntry(shape.name, shape.dtype, shape.shape, shape.nbytes, digest))
            writer.sync()
    for path in asset_files(source):
        write_file(partial / path.name, path.read_bytes())
    manifest = writer.manifest(entries, aliases, run_id, policy, declared[0] if declared else MIXED)
    write_file(partial / MANIFEST_NAME, encode_manifest(manifest))
    publish_folder(partial, out)
    return manifest


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
            if span.tensor.name in stored:
                raise IntegrityError(f"tensor {span.tensor.name!r} is in {stored[span.tensor.name].file} and in {file}")
            stored[span.tensor.name] = _Stored(file, span)
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
        same_shape = head is not None and head.span.tensor.nbytes == stored[_EMBEDDING].span.tensor.nbytes
        if head is None or (same_shape and _digest(head) == _digest(stored[_EMBEDDING])):
            ties[_HEAD] = _EMBEDDING
    return ties


def _blocks(tensor: _Stored) -> Iterator[bytes]:
    """The tensor's bytes, a block at a time."""
    offset, left = tensor.span.start, tensor.span.tensor.nbytes
    with tensor.file.open("rb", buffering=0) as file:
        while left:
            block = os.pread(file.fileno(), min(CHUNK_BYTES, left), offset)
            if not block:
                raise IntegrityError(f"{tensor.file} became shorter while it was read")
            yield block
            offset += len(block)
            left -= len(block)


def _digest(tensor: _Stored) -> str:
    digest = blake3()
    for block in _blocks(tensor):
        digest.update(block)
    return digest.hexdigest()
