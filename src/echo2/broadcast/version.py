"""One published version on the coordinator's disk.

Invariant: a file here that counts was complete before its signature was written: of a raw snapshot ``manifest.json``
comes last, of a wire object ``<kind>.signed``. What an interrupted writer left has none and is removed when the folder
is read. Everything that counts was signed by the run's key and decodes to the same root (I6).

    <shelf>/<incarnation>.<version>/  model.safetensors  signature  manifest.json    raw: deltas build on it
                                      delta   delta.signed                           what travels to holders of the base
                                      anchor  anchor.signed                          what travels to everybody else
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from echo2.broadcast.catalogue import Entry
from echo2.broadcast.manifest import Manifest, SignedManifest
from echo2.broadcast.parse import LORA, encode_manifest
from echo2.broadcast.signing import encode_signed, open_signed, sign
from echo2.durable import ASIDE, sync_folder, write_file
from echo2.errors import IntegrityError
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME
from echo2.types import Policy, SnapshotKind

SIGNATURE_NAME = "signature"
SIGNED = ".signed"
WIRE_KINDS = (SnapshotKind.DELTA, SnapshotKind.ANCHOR)


class WireObject(msgspec.Struct, frozen=True):
    """A signed object that can be sent."""

    entry: Entry
    path: Path
    signed: bytes


class Version(msgspec.Struct, frozen=True):
    policy: Policy
    folder: Path
    raw: Manifest | None
    """Of the decoded snapshot; None once only its objects are kept."""
    objects: tuple[WireObject, ...]

    @property
    def decoded_root(self) -> str:
        return self.raw.decoded_root if self.raw is not None else self.objects[0].entry.decoded_root


def read_version(folder: Path, policy: Policy, public: bytes) -> Version | None:
    """What counts in a version's folder; None when nothing does.

    Raises IntegrityError for a part that this run's key did not sign, or parts that do not belong together.
    """
    for path in folder.glob(f"*{ASIDE}"):
        path.unlink()
    raw = _read_raw(folder, public)
    objects = tuple(found for kind in WIRE_KINDS if (found := _read_object(folder, kind, public)) is not None)
    told = [(raw.policy, raw.decoded_root)] if raw is not None else []
    told += [(found.entry.policy, found.entry.decoded_root) for found in objects]
    if not told:
        return None
    if len({root for _, root in told}) > 1 or {named for named, _ in told} != {policy}:
        raise IntegrityError(f"its parts are not all of version {policy} and of one root")
    return Version(policy, folder, raw, objects)


def sign_raw(folder: Path, manifest: Manifest, private: bytes) -> None:
    """Let the raw snapshot in ``folder``, which was verified, count. Raises DiskFull."""
    signed = sign(encode_manifest(manifest), private)
    write_file(folder / SIGNATURE_NAME, signed.signature)
    write_file(folder / MANIFEST_NAME, signed.manifest)


def sign_object(folder: Path, manifest: Manifest, private: bytes) -> WireObject:
    """Let the object that lies in ``folder`` under its kind's name, and was verified, count. Raises DiskFull."""
    signed = encode_signed(sign(encode_manifest(manifest), private))
    write_file(folder / (manifest.kind.value + SIGNED), signed)
    return WireObject(entry_of(manifest), folder / manifest.kind.value, signed)


def forget_raw(version: Version) -> None:
    (version.folder / MANIFEST_NAME).unlink(missing_ok=True)
    sync_folder(version.folder)
    (version.folder / OBJECT_NAME).unlink(missing_ok=True)
    (version.folder / SIGNATURE_NAME).unlink(missing_ok=True)


def forget_object(found: WireObject) -> None:
    found.path.with_name(found.path.name + SIGNED).unlink(missing_ok=True)
    sync_folder(found.path.parent)
    found.path.unlink(missing_ok=True)


def entry_of(manifest: Manifest) -> Entry:
    return Entry(
        policy=manifest.policy,
        kind=manifest.kind,
        base=manifest.base,
        root=manifest.object_root,
        size_bytes=manifest.object_size,
        decoded_root=manifest.decoded_root,
        base_stays=manifest.codec == LORA,
    )


def _read_raw(folder: Path, public: bytes) -> Manifest | None:
    try:
        manifest = (folder / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        (folder / OBJECT_NAME).unlink(missing_ok=True)
        return None
    signature = (folder / SIGNATURE_NAME).read_bytes()
    opened = open_signed(encode_signed(SignedManifest(manifest, signature)), public)
    _check_size(folder / OBJECT_NAME, opened)
    return opened


def _read_object(folder: Path, kind: SnapshotKind, public: bytes) -> WireObject | None:
    path = folder / kind.value
    try:
        signed = path.with_name(kind.value + SIGNED).read_bytes()
    except FileNotFoundError:
        path.unlink(missing_ok=True)
        return None
    manifest = open_signed(signed, public)
    if manifest.kind is not kind:
        raise IntegrityError(f"{path.name}{SIGNED} must describe the {kind.value}, it describes the {manifest.kind}")
    _check_size(path, manifest)
    return WireObject(entry_of(manifest), path, signed)


def _check_size(path: Path, manifest: Manifest) -> None:
    size = os.stat(path).st_size
    if size != manifest.object_size:
        raise IntegrityError(f"{path.name} must have {manifest.object_size} bytes, got {size}")
