"""What turns one model directory into another, as one file, for ``echo2 snapshot diff | apply``.

Invariant: a patch is a wire object, the small files that go with it, and a head that says how long each of them is; the
lengths add up to the file's own or the file is refused. Applying it makes a snapshot folder that is whole and verified,
or none.

    ┌──────────────────┬──────────────────┬──────────────┬───────────────┬──────────────┐
    │ object           │ small files      │ head, JSON   │ its length  4 │ ending     8 │
    └──────────────────┴──────────────────┴──────────────┴───────────────┴──────────────┘

The head is last because only a finished object has a size and hashes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from echo2.broadcast.body import Contents, Weights
from echo2.broadcast.checking import CheckedBody
from echo2.broadcast.delta import encode_delta
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.pack import asset_files, open_weights
from echo2.broadcast.parse import DELTA, MAX_MANIFEST_BYTES, RAW, encode_manifest, parse_manifest
from echo2.broadcast.places import beside, check_free, folders_for, users_paths
from echo2.broadcast.planes import encode_anchor
from echo2.broadcast.unpack import check_base, rebuild, unfinished, unfinished_name
from echo2.durable import ASIDE, publish_folder, room_for, sync_folder, write_all, write_file
from echo2.errors import IntegrityError, Malformed, UserError
from echo2.transport.assets import MAX_ASSETS, check_asset
from echo2.transport.messages import AssetFile
from echo2.transport.model_folder import ASSET_SUFFIXES, INDEX_NAME
from echo2.transport.partial import MANIFEST_NAME
from echo2.types import Policy

ENDING = b"echo2pt1"
MAX_HEAD_BYTES = MAX_MANIFEST_BYTES + 1024 * 1024
_TAIL = struct.Struct("<I8s")


class PatchHead(msgspec.Struct, frozen=True):
    manifest: Manifest
    """Of the object."""
    files: tuple[AssetFile, ...]
    """Small files in the patch: those of the new directory that the base's directory lacks or has otherwise; with an
    anchor all of them."""
    why: str
    """Why the object is no delta; empty when it is one."""


@users_paths()
def write_patch(base: Path, new: Path, out: Path) -> PatchHead:
    """Write file ``out``, whole or absent, which makes ``new``'s weights of ``base``'s.

    Both are snapshot folders or Hugging Face directories. The patch holds a delta where that is smaller, else an
    anchor, which needs no base. What goes into it is compared with its hashes while it is read. Raises UserError,
    IntegrityError, DiskFull.
    """
    aside = beside(out, ".object" + ASIDE)
    check_free(out, files=(aside, beside(aside, ASIDE)))
    older, newer = open_weights(base), open_weights(new)
    with folders_for(out), CheckedBody(older, base) as old_body, CheckedBody(newer, new) as new_body:
        newer = Weights(_after(newer.contents, older.contents.policy), new_body)
        older = Weights(older.contents, old_body)
        try:
            why = ""
            manifest = encode_delta(older, newer, aside)
            if manifest is None:
                fit = older.contents.fit(newer.contents)
                why = "a delta would be larger" if fit else "the tensors have other names, types or shapes"
                manifest = encode_anchor(newer, aside)
            else:
                old_body.end()
            new_body.end()
            known = {} if why else {asset.name: asset for asset in map(_asset, asset_files(base))}
            files = [path for path in asset_files(new) if known.get(path.name) != _asset(path)]
            head = PatchHead(manifest, tuple(map(_asset, files)), why)
            with room_for(out):
                _append(aside, files, msgspec.json.encode(head))
                os.replace(aside, out)
                sync_folder(out.parent)
        finally:
            aside.unlink(missing_ok=True)
    return head


@users_paths()
def apply_patch(base: Path, patch: Path, out: Path) -> Manifest:
    """Make snapshot folder ``out``, whole or absent, of ``base`` and a patch; return its manifest.

    ``base``'s small files come along, except where the patch holds others; with an anchor only the patch's do, if it
    has any. Raises UserError when ``base`` is not the patch's or a path is wrong, IntegrityError, DiskFull.
    """
    check_free(out, folder=unfinished_name(out))
    if not patch.is_file():
        raise UserError(f"{patch} must be a patch made by echo2 snapshot diff; there is no such file")
    if not base.is_dir():
        raise UserError(f"{base} must be the base's directory; there is no such directory")
    head = read_head(patch)
    if head.manifest.codec != DELTA:
        with unfinished(out) as aside:
            manifest = rebuild(head.manifest, patch, None, aside)
            _write_files(head, patch, [] if head.files else asset_files(base), aside)
            publish_folder(aside, out)
        return manifest
    with (weights := open_weights(base)).body:
        try:
            check_base(head.manifest, weights.contents)
        except IntegrityError as error:
            raise UserError(f"{base} is not what {patch} was made from: {error}") from None
        with unfinished(out) as aside:
            manifest = rebuild(head.manifest, patch, weights.body, aside)
            _write_files(head, patch, asset_files(base), aside)
            publish_folder(aside, out)
    return manifest


def read_head(patch: Path) -> PatchHead:
    """Raises IntegrityError unless the file's parts are within their limits and add up to its size."""
    with patch.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - _TAIL.size, 0))
        tail = file.read()
        if len(tail) < _TAIL.size or not tail.endswith(ENDING):
            raise IntegrityError(
                f"{patch} is no whole patch: it must end with {ENDING.decode()}; copy or make it again"
            )
        length = _TAIL.unpack(tail)[0]
        if not 0 < length <= min(MAX_HEAD_BYTES, size - _TAIL.size):
            raise IntegrityError(
                f"{patch}: a head has at most {MAX_HEAD_BYTES} bytes and lies in the file, got {length}"
            )
        file.seek(size - _TAIL.size - length)
        head = _parse_head(patch, file.read(length))
    expected = head.manifest.object_size + sum(asset.size for asset in head.files) + length + _TAIL.size
    if expected != size:
        raise IntegrityError(f"{patch} must have the {expected} bytes that its head adds up to, got {size}")
    return head


def _parse_head(patch: Path, data: bytes) -> PatchHead:
    try:
        head = msgspec.json.decode(data, type=PatchHead)
        for asset in head.files:
            check_asset(asset)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Malformed) as error:
        raise IntegrityError(f"{patch}: its head could not be read: {error}") from None
    names = [asset.name for asset in head.files]
    wrong = [name for name in names if Path(name).suffix not in ASSET_SUFFIXES or name in (INDEX_NAME, MANIFEST_NAME)]
    if wrong or len(set(names)) != len(names) or len(names) > MAX_ASSETS:
        raise IntegrityError(
            f"{patch} may carry {MAX_ASSETS} small files of a model, each once; it carries {names[:9]}"
        )
    manifest = parse_manifest(encode_manifest(head.manifest))
    if manifest.codec == RAW:
        raise IntegrityError(f"{patch} must hold a delta or planes, got codec {manifest.codec}")
    return head


def _after(new: Contents, base: Policy) -> Contents:
    """Two packed directories are both version 0.0; the newer one is called the next version then."""
    if new.policy > base:
        return new
    return msgspec.structs.replace(new, policy=Policy(base.incarnation, base.version + 1))


def _asset(path: Path) -> AssetFile:
    data = path.read_bytes()
    return AssetFile(path.name, len(data), blake3(data).hexdigest())


def _append(object_path: Path, files: Sequence[Path], head: bytes) -> None:
    descriptor = os.open(object_path, os.O_WRONLY | os.O_APPEND)
    try:
        for path in files:
            write_all(descriptor, path.read_bytes())
        write_all(descriptor, head)
        write_all(descriptor, _TAIL.pack(len(head), ENDING))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_files(head: PatchHead, patch: Path, from_base: Sequence[Path], folder: Path) -> None:
    """The base's small files, then the patch's own over them. Raises IntegrityError."""
    for path in from_base:
        write_file(folder / path.name, path.read_bytes())
    with patch.open("rb") as file:
        file.seek(head.manifest.object_size)
        for asset in head.files:
            data = file.read(asset.size)
            if blake3(data).hexdigest() != asset.blake3:
                raise IntegrityError(f"{patch}: its file {asset.name} is damaged; copy or make the patch again")
            write_file(folder / asset.name, data)
