"""The coordinator's snapshots and model assets.

Invariant: what ``published`` lists is whole, verified and signed, and stays so until ``prune``; an upload becomes
visible by one rename, after everything about it was checked and synced. An interrupted upload, a restart or a full disk
leaves the published versions as they were and the upload where it can be continued (E05, E07).

On disk: ``<shelf>/<incarnation>.<version>/`` holds the object, ``manifest.json`` exactly as signed and ``signature``;
``….partial/`` an upload under way; ``<shelf>/../assets/`` the model's small files.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Protocol, TypeVar

from blake3 import blake3

from echo2.broadcast.manifest import Manifest, SignedManifest
from echo2.broadcast.parse import encode_manifest, parse_manifest
from echo2.broadcast.signing import encode_signed, open_signed, public_key, sign
from echo2.broadcast.snapshot import verify_snapshot
from echo2.durable import ASIDE, publish_folder, remove_folder, room_for, write_file
from echo2.errors import IntegrityError, Malformed, Refused
from echo2.transport.assets import MAX_ASSETS, check_asset, is_asset_name
from echo2.transport.messages import AssetFile
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME, PARTIAL, PartialObject, folder_name
from echo2.types import Policy

SIGNATURE_NAME = "signature"
OFFER_NAME = "offer.json"
"""Manifest of an upload under way, so that it can go on after a restart without a new offer."""

_FOLDER = re.compile(r"(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})")
T = TypeVar("T")


class Shelf(Protocol):
    async def offer(self, manifest: Manifest) -> int:
        """Begin or continue an upload; bytes already received, all of them when the version is published.

        Raises Refused when the version was published with other bytes.
        """
        ...

    async def write(self, policy: Policy, offset: int, data: bytes) -> int:
        """Take whole chunks at ``offset``, which must be what was received; return the new count.

        A piece that was taken before is confirmed again. Raises Refused, Malformed, IntegrityError, DiskFull.
        """
        ...

    async def finish(self, policy: Policy) -> bytes:
        """Verify, sign and publish; return the signed manifest. Finishing again returns the same bytes."""
        ...

    async def signed_manifest(self, policy: Policy) -> bytes | None: ...

    async def published(self) -> list[Policy]:
        """Oldest first."""
        ...

    async def prune(self, keep: Set[Policy]) -> None:
        """Forget published versions outside ``keep`` and uploads older than the newest published version."""
        ...

    async def missing_assets(self, assets: Sequence[AssetFile]) -> tuple[str, ...]:
        """Names of the listed files that are absent or different. Raises Malformed for unfit names or sizes."""
        ...

    async def write_asset(self, asset: AssetFile, data: bytes) -> None:
        """Keep one file. Raises Malformed, IntegrityError when ``data`` is not what ``asset`` says, DiskFull."""
        ...


class DiskShelf:
    """A shelf in a folder. Blocking work runs in threads, one change at a time."""

    def __init__(self, folder: Path, private_key: bytes) -> None:
        """Raises IntegrityError for a published folder that this run's key did not sign."""
        self._folder = folder
        self._assets = folder.parent / "assets"
        self._private_key = private_key
        self._changing = asyncio.Lock()
        self._uploads: dict[Policy, PartialObject] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._assets.mkdir(parents=True, exist_ok=True)
        self._signed = self._load()

    async def offer(self, manifest: Manifest) -> int:
        return await self._change(lambda: self._offer(manifest))

    async def write(self, policy: Policy, offset: int, data: bytes) -> int:
        return await self._change(lambda: self._write(policy, offset, data))

    async def finish(self, policy: Policy) -> bytes:
        return await self._change(lambda: self._finish(policy))

    async def signed_manifest(self, policy: Policy) -> bytes | None:
        return self._signed.get(policy)

    async def published(self) -> list[Policy]:
        return sorted(self._signed)

    async def prune(self, keep: Set[Policy]) -> None:
        await self._change(lambda: self._prune(keep))

    async def missing_assets(self, assets: Sequence[AssetFile]) -> tuple[str, ...]:
        if len(assets) > MAX_ASSETS:
            raise Malformed(f"a model has at most {MAX_ASSETS} asset files, got {len(assets)}")
        for asset in assets:
            check_asset(asset)
        return await self._change(lambda: tuple(a.name for a in assets if not self._holds(a)))

    async def write_asset(self, asset: AssetFile, data: bytes) -> None:
        check_asset(asset)
        await self._change(lambda: self._write_asset(asset, data))

    def object_path(self, policy: Policy) -> Path | None:
        """The published object's file; None when there is none. It may be pruned before it is opened."""
        return self._folder / folder_name(policy) / OBJECT_NAME if policy in self._signed else None

    def asset_path(self, name: str) -> Path | None:
        """The asset's file; None when there is none or the name is no asset's."""
        if not is_asset_name(name):
            return None
        path = self._assets / name
        return path if path.is_file() else None

    def close(self) -> None:
        """Let go of uploads under way; their files stay and are continued by a later life."""
        while self._uploads:
            self._uploads.popitem()[1].close()

    async def _change(self, work: Callable[[], T]) -> T:
        """Run ``work`` alone in a thread and see it through even if the caller is cancelled meanwhile."""
        async with self._changing:
            running = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])  # the thread cannot be stopped; the lock must outlast it
                raise

    def _load(self) -> dict[Policy, bytes]:
        signed: dict[Policy, bytes] = {}
        for folder in sorted(self._folder.iterdir()):
            if folder.name.endswith(ASIDE):
                remove_folder(folder)
                continue
            if not _FOLDER.fullmatch(folder.name):
                continue
            try:
                manifest, signature = (folder / MANIFEST_NAME).read_bytes(), (folder / SIGNATURE_NAME).read_bytes()
                data = encode_signed(SignedManifest(manifest, signature))
                policy = open_signed(data, public_key(self._private_key)).policy
            except (IntegrityError, FileNotFoundError) as error:
                raise IntegrityError(f"{folder} cannot be served: {error}; move it away or restore its files") from None
            signed[policy] = data
        return signed

    def _offer(self, manifest: Manifest) -> int:
        policy = manifest.policy
        if policy in self._signed:
            published = open_signed(self._signed[policy], public_key(self._private_key))
            if published.object_root != manifest.object_root or published.decoded_root != manifest.decoded_root:
                raise Refused(f"version {policy} was published with other weights; a version never changes")
            return manifest.object_size
        partial = self._partial(policy)
        offer = encode_manifest(manifest)
        if (upload := self._uploads.pop(policy, None)) is not None:
            upload.close()
        with room_for(partial):
            partial.mkdir(exist_ok=True)
            write_file(partial / OFFER_NAME, offer)
        upload = PartialObject(partial / OBJECT_NAME, manifest)
        self._uploads[policy] = upload
        return upload.received

    def _write(self, policy: Policy, offset: int, data: bytes) -> int:
        upload = self._upload(policy)
        if offset < upload.received and offset + len(data) <= upload.received:
            return upload.received
        if offset != upload.received:
            raise Refused(f"the next piece of snapshot {policy} must begin at {upload.received}, got {offset}")
        return upload.append(data)

    def _upload(self, policy: Policy) -> PartialObject:
        if policy not in self._uploads:
            offer = self._partial(policy) / OFFER_NAME
            if policy in self._signed or not offer.is_file():
                raise Refused(f"snapshot {policy} is not being uploaded; offer it first")
            self._uploads[policy] = PartialObject(offer.with_name(OBJECT_NAME), parse_manifest(offer.read_bytes()))
        return self._uploads[policy]

    def _finish(self, policy: Policy) -> bytes:
        if policy in self._signed:
            return self._signed[policy]
        upload = self._upload(policy)
        partial = self._partial(policy)
        manifest = parse_manifest((partial / OFFER_NAME).read_bytes())
        if upload.received != manifest.object_size:
            raise Refused(f"snapshot {policy} has {upload.received} of {manifest.object_size} bytes; upload the rest")
        upload.seal()
        verify_snapshot(partial, manifest)
        signed = sign(encode_manifest(manifest), self._private_key)
        write_file(partial / SIGNATURE_NAME, signed.signature)
        write_file(partial / MANIFEST_NAME, signed.manifest)
        publish_folder(partial, self._folder / folder_name(policy))
        (self._folder / folder_name(policy) / OFFER_NAME).unlink(missing_ok=True)
        self._uploads.pop(policy).close()
        self._signed[policy] = encode_signed(signed)
        return self._signed[policy]

    def _prune(self, keep: Set[Policy]) -> None:
        newest = max(self._signed, default=None)
        for policy in sorted(self._signed):
            if policy not in keep:
                del self._signed[policy]
                remove_folder(self._folder / folder_name(policy))
        for folder in sorted(self._folder.glob(f"*{PARTIAL}")):
            named = _FOLDER.fullmatch(folder.name.removesuffix(PARTIAL))
            if named and newest is not None and Policy(int(named[1]), int(named[2])) <= newest:
                if (upload := self._uploads.pop(Policy(int(named[1]), int(named[2])), None)) is not None:
                    upload.close()
                remove_folder(folder)

    def _holds(self, asset: AssetFile) -> bool:
        path = self.asset_path(asset.name)
        return path is not None and path.stat().st_size == asset.size and _hash(path.read_bytes()) == asset.blake3

    def _write_asset(self, asset: AssetFile, data: bytes) -> None:
        if len(data) != asset.size or _hash(data) != asset.blake3:
            raise IntegrityError(f"asset {asset.name} is not the announced file ({asset.size} bytes); send it again")
        if self.asset_path(asset.name) is None and sum(1 for _ in self._assets.iterdir()) >= MAX_ASSETS:
            raise Malformed(f"a model has at most {MAX_ASSETS} asset files")
        write_file(self._assets / asset.name, data)

    def _partial(self, policy: Policy) -> Path:
        return self._folder / (folder_name(policy) + PARTIAL)


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()
