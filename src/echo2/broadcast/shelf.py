"""What the coordinator keeps snapshots on, as its programs see it.

Invariant: what ``catalogue`` lists is whole, verified and signed, and stays so until ``prune``; a version becomes
visible at once and as a whole, and never changes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

import msgspec

from echo2.broadcast.catalogue import Entry
from echo2.broadcast.manifest import Manifest
from echo2.transport.messages import AssetFile
from echo2.types import Policy


class Published(msgspec.Struct, frozen=True):
    """What became of an upload."""

    entry: Entry
    """The object that its publish sends."""
    raw_bytes: int
    """Of the decoded snapshot."""
    changed_share: float | None = None
    """Share of elements that the delta changes; None where there is no delta."""


class Shelf(Protocol):
    async def offer(self, manifest: Manifest) -> int | None:
        """Begin or continue an upload; bytes already received, all of them when the version is published.

        None when the shelf lacks the base of an offered delta. Raises Refused when the version was published with other
        bytes.
        """
        ...

    async def write(self, root: str, offset: int, data: bytes) -> int:
        """Take whole chunks at ``offset``, which must be what was received; return the new count.

        A piece that was taken before is confirmed again. Raises Refused, Malformed, IntegrityError, DiskFull.
        """
        ...

    async def finish(self, policy: Policy, root: str) -> Published:
        """Verify, sign and publish; of a raw snapshot that includes its anchor. Finishing again changes nothing."""
        ...

    async def add_anchor(self, policy: Policy) -> str | None:
        """Root of a published version's anchor, encoded now if there is none; None when the version is gone.

        Takes long; uploads go on meanwhile. Raises DiskFull, IntegrityError.
        """
        ...

    async def prune(self, keep: Set[Policy], held: Set[Policy], under_way: Set[str]) -> tuple[str, ...]:
        """Forget snapshots outside ``keep``, objects that nobody needs, and uploads older than the newest version.

        held: policies that workers run.  under_way: roots of objects that workers bring.
        Returns the roots of the objects that are gone.
        """
        ...

    def catalogue(self) -> list[Entry]:
        """The objects that can be sent, oldest version first."""
        ...

    def signed(self, root: str) -> bytes | None:
        """Signed manifest of an object in the catalogue."""
        ...

    async def missing_assets(self, assets: Sequence[AssetFile]) -> tuple[str, ...]:
        """Names of the listed files that are absent or different. Raises Malformed for unfit names or sizes."""
        ...

    async def write_asset(self, asset: AssetFile, data: bytes) -> None:
        """Keep one file. Raises Malformed, IntegrityError when ``data`` is not what ``asset`` says, DiskFull."""
        ...
