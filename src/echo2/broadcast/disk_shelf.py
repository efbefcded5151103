"""The shelf in a folder: snapshots, the objects that they travel as, and the model's assets.

Invariant: what ``catalogue`` lists is whole, verified and signed, and stays so until ``prune``; a version becomes
visible by one rename, after everything about it was checked and synced. An interrupted upload or encoding, a restart or
a full disk leaves the published versions as they were and the upload where it can be continued (E05, E07).

On disk: ``<shelf>/<incarnation>.<version>/`` as ``version.py`` says; ``….partial/`` an upload under way;
``<shelf>/../assets/`` the model's small files.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TypeVar

import msgspec

from echo2.broadcast.asset_folder import AssetFolder
from echo2.broadcast.catalogue import Entry
from echo2.broadcast.keeping import needed_roots
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.planes import write_anchor
from echo2.broadcast.share import changed_share
from echo2.broadcast.shelf import Published
from echo2.broadcast.signing import open_signed, public_key
from echo2.broadcast.snapshot import verify_snapshot
from echo2.broadcast.unpack import unpack
from echo2.broadcast.upload import OFFER_NAME, Upload
from echo2.broadcast.version import (
    SIGNATURE_NAME,
    SIGNED,
    WIRE_KINDS,
    Version,
    WireObject,
    forget_object,
    forget_raw,
    read_version,
    sign_object,
    sign_raw,
)
from echo2.durable import ASIDE, publish_folder, remove_folder
from echo2.errors import IntegrityError, Refused
from echo2.transport.messages import AssetFile
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME, PARTIAL, folder_name
from echo2.types import Policy, SnapshotKind

_FOLDER = re.compile(r"(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})")
RAW_FOLDER = "raw"
"""In an upload's folder, while its delta is decoded."""
T = TypeVar("T")


class DiskShelf:
    """A shelf in a folder. Blocking work runs in threads, one change at a time; an encoding beside them."""

    def __init__(self, folder: Path, private_key: bytes) -> None:
        """Raises IntegrityError for a published folder that this run's key did not sign."""
        self._folder = folder
        self._assets = AssetFolder(folder.parent / "assets")
        self._private_key = private_key
        self._changing = asyncio.Lock()
        self._encoding = asyncio.Lock()
        self._encoded: Policy | None = None
        """Version whose anchor is being made: its files stay meanwhile."""
        self._uploads: dict[Policy, Upload] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._versions = self._load()

    async def offer(self, manifest: Manifest) -> int | None:
        return await self._change(lambda: self._offer(manifest))

    async def write(self, root: str, offset: int, data: bytes) -> int:
        return await self._change(lambda: self._upload(root).write(offset, data))

    async def finish(self, policy: Policy, root: str) -> Published:
        return await self._change(lambda: self._finish(policy, root))

    async def add_anchor(self, policy: Policy) -> str | None:
        async with self._encoding:
            version = self._versions.get(policy)
            if version is None:
                return None
            for found in version.objects:
                if found.entry.kind is SnapshotKind.ANCHOR:
                    return found.entry.root
            if version.raw is None:
                return None
            self._encoded = policy
            try:
                manifest = await _seen_through(lambda: write_anchor(version.folder, version.folder / "anchor"))
                return await self._change(lambda: self._take_anchor(policy, manifest))
            finally:
                self._encoded = None

    async def prune(self, keep: Set[Policy], held: Set[Policy], under_way: Set[str]) -> tuple[str, ...]:
        return await self._change(lambda: self._prune(keep, held, under_way))

    async def missing_assets(self, assets: Sequence[AssetFile]) -> tuple[str, ...]:
        return await self._change(lambda: self._assets.missing(assets))

    async def write_asset(self, asset: AssetFile, data: bytes) -> None:
        await self._change(lambda: self._assets.write(asset, data))

    def catalogue(self) -> list[Entry]:
        return [found.entry for policy in sorted(self._versions) for found in self._versions[policy].objects]

    def signed(self, root: str) -> bytes | None:
        found = self._find(root)
        return None if found is None else found.signed

    def object_path(self, root: str) -> Path | None:
        """File of an object in the catalogue; None when there is none. It may be pruned before it is opened."""
        found = self._find(root)
        return None if found is None else found.path

    def asset_path(self, name: str) -> Path | None:
        """The asset's file; None when there is none or the name is no asset's."""
        return self._assets.path(name)

    def close(self) -> None:
        """Let go of uploads under way; their files stay and are continued by a later life."""
        while self._uploads:
            self._uploads.popitem()[1].close()

    async def _change(self, work: Callable[[], T]) -> T:
        async with self._changing:
            return await _seen_through(work)

    def _find(self, root: str) -> WireObject | None:
        every = (found for version in self._versions.values() for found in version.objects)
        return next((found for found in every if found.entry.root == root), None)

    def _load(self) -> dict[Policy, Version]:
        versions: dict[Policy, Version] = {}
        for folder in sorted(self._folder.iterdir()):
            if folder.name.endswith(ASIDE):
                remove_folder(folder)
                continue
            if (policy := _policy_in(folder.name)) is None:
                continue
            try:
                version = read_version(folder, policy, public_key(self._private_key))
            except (IntegrityError, FileNotFoundError) as error:
                raise IntegrityError(f"{folder} cannot be served: {error}; move it away or restore its files") from None
            if version is not None:
                versions[policy] = version
        return versions

    # ---- uploads -----------------------------------------------------------------------------------------------

    def _offer(self, manifest: Manifest) -> int | None:
        policy = manifest.policy
        if (published := self._versions.get(policy)) is not None:
            if published.decoded_root != manifest.decoded_root:
                raise Refused(f"version {policy} was published with other weights; a version never changes")
            return manifest.object_size
        if manifest.kind is SnapshotKind.DELTA and self._base_of(manifest) is None:
            return None
        if (under_way := self._uploads.pop(policy, None)) is not None:
            under_way.close()
        upload = self._uploads[policy] = Upload.begin(self._partial(policy), manifest)
        return upload.received

    def _base_of(self, manifest: Manifest) -> Version | None:
        base = None if manifest.base is None else self._versions.get(manifest.base)
        fits = base is not None and base.raw is not None and base.decoded_root == manifest.base_root
        return base if fits else None

    def _upload(self, root: str) -> Upload:
        for policy, folder in self._partials():
            if policy not in self._uploads and (resumed := Upload.resume(folder)) is not None:
                self._uploads[policy] = resumed
        for upload in self._uploads.values():
            if upload.manifest.object_root == root:
                return upload
        raise Refused(f"object {root[:16]}… is not being uploaded; offer it first")

    def _finish(self, policy: Policy, root: str) -> Published:
        if policy not in self._versions:
            upload = self._upload(root)
            if upload.manifest.policy != policy:
                raise Refused(f"object {root[:16]}… is of {upload.manifest.policy}, not of {policy}; offer it first")
            upload.seal()
            _forget_made(upload)  # an earlier life may have died in the middle
            try:
                self._complete(upload)
            except BaseException:
                _forget_made(upload)  # a full disk wants its bytes back: the next try needs as much again
                raise
            final = self._folder / folder_name(policy)
            publish_folder(upload.folder, final)
            (final / OFFER_NAME).unlink(missing_ok=True)
            self._uploads.pop(policy).close()
            version = read_version(final, policy, public_key(self._private_key))
            assert version is not None
            self._versions[policy] = version
        return _published(self._versions[policy], public_key(self._private_key))

    def _complete(self, upload: Upload) -> None:
        """Make a version of an upload's folder, all but its name."""
        manifest, folder = upload.manifest, upload.folder
        if manifest.kind is SnapshotKind.DELTA:
            base = self._base_of(manifest)
            if base is None:
                raise IntegrityError(f"the base {manifest.base} of {manifest.policy} left the shelf; offer it whole")
            raw = unpack(manifest, upload.path, base.folder, folder / RAW_FOLDER)
            os.replace(folder / RAW_FOLDER / OBJECT_NAME, folder / OBJECT_NAME)
            remove_folder(folder / RAW_FOLDER)
            sign_raw(folder, raw, self._private_key)
            sign_object(folder, manifest, self._private_key)
        else:
            verify_snapshot(folder, manifest)
            sign_raw(folder, manifest, self._private_key)
            sign_object(folder, write_anchor(folder, folder / "anchor"), self._private_key)

    def _take_anchor(self, policy: Policy, manifest: Manifest) -> str:
        version = self._versions[policy]
        try:
            found = sign_object(version.folder, manifest, self._private_key)
        except BaseException:
            (version.folder / SnapshotKind.ANCHOR.value).unlink(missing_ok=True)
            raise
        self._versions[policy] = msgspec.structs.replace(version, objects=(*version.objects, found))
        return found.entry.root

    # ---- pruning -----------------------------------------------------------------------------------------------

    def _prune(self, keep: Set[Policy], held: Set[Policy], under_way: Set[str]) -> tuple[str, ...]:
        newest = max(self._versions, default=None)
        bases = {found.entry.base for found in self._objects_of(newest) if found.entry.base_stays}
        kept_raw = keep | {policy for policy in (newest, self._encoded, *bases) if policy is not None}
        kept = needed_roots(self.catalogue(), keep, held, under_way)
        gone: list[str] = []
        for policy, version in sorted(self._versions.items()):
            left = tuple(found for found in version.objects if found.entry.root in kept)
            raw = version.raw if policy in kept_raw else None
            gone += [found.entry.root for found in version.objects if found not in left]
            if not left and raw is None:
                del self._versions[policy]
                remove_folder(version.folder)
                continue
            self._versions[policy] = msgspec.structs.replace(version, raw=raw, objects=left)
            for found in version.objects:
                if found not in left:
                    forget_object(found)
            if version.raw is not None and raw is None:
                forget_raw(version)
        for policy, folder in self._partials():
            if newest is not None and policy <= newest:
                if (upload := self._uploads.pop(policy, None)) is not None:
                    upload.close()
                remove_folder(folder)
        return tuple(gone)

    def _objects_of(self, policy: Policy | None) -> tuple[WireObject, ...]:
        return () if policy is None else self._versions[policy].objects

    def _partials(self) -> list[tuple[Policy, Path]]:
        found = [(_policy_in(path.name.removesuffix(PARTIAL)), path) for path in self._folder.glob(f"*{PARTIAL}")]
        return sorted((policy, path) for policy, path in found if policy is not None)

    def _partial(self, policy: Policy) -> Path:
        return self._folder / (folder_name(policy) + PARTIAL)


async def _seen_through(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread and see it through even if the caller is cancelled meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])  # the thread cannot be stopped; locks around it must outlast it
        raise


def _forget_made(upload: Upload) -> None:
    """Remove what a version is made of, all but the object that was uploaded: that is continued."""
    for name in (OBJECT_NAME, *(kind.value for kind in WIRE_KINDS)):
        if name != upload.path.name:
            (upload.folder / name).unlink(missing_ok=True)
    for name in (MANIFEST_NAME, SIGNATURE_NAME, *(kind.value + SIGNED for kind in WIRE_KINDS)):
        (upload.folder / name).unlink(missing_ok=True)
    remove_folder(upload.folder / RAW_FOLDER)


def _published(version: Version, public: bytes) -> Published:
    """The delta where there is one: it is what base holders take."""
    found = version.objects[0]
    changed = None
    if found.entry.kind is SnapshotKind.DELTA and not found.entry.base_stays:
        changed = changed_share(open_signed(found.signed, public), found.path)
    raw_bytes = version.raw.object_size if version.raw is not None else found.entry.size_bytes
    return Published(found.entry, raw_bytes, changed)


def _policy_in(name: str) -> Policy | None:
    named = _FOLDER.fullmatch(name)
    return Policy(int(named[1]), int(named[2])) if named else None
