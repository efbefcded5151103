"""The model's small files (configuration, tokenizer) on the coordinator's disk.

Invariant (E03): a file here bears a name that is no path, and was compared with its hash when it was written; a link is
none of these files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from echo2.durable import write_file
from echo2.errors import IntegrityError, Malformed
from echo2.transport.assets import MAX_ASSETS, check_asset, is_asset_name
from echo2.transport.messages import AssetFile


class AssetFolder:
    """Blocking: call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, assets: Sequence[AssetFile]) -> tuple[str, ...]:
        """Names of the listed files that are absent or different. Raises Malformed for unfit names or sizes."""
        if len(assets) > MAX_ASSETS:
            raise Malformed(f"a model has at most {MAX_ASSETS} asset files, got {len(assets)}")
        for asset in assets:
            check_asset(asset)
        return tuple(asset.name for asset in assets if not self._holds(asset))

    def write(self, asset: AssetFile, data: bytes) -> None:
        """Keep one file. Raises Malformed, IntegrityError when ``data`` is not what ``asset`` says, DiskFull."""
        check_asset(asset)
        if len(data) != asset.size or _hash(data) != asset.blake3:
            raise IntegrityError(f"asset {asset.name} is not the announced file ({asset.size} bytes); send it again")
        if self.path(asset.name) is None and sum(1 for _ in self._folder.iterdir()) >= MAX_ASSETS:
            raise Malformed(f"a model has at most {MAX_ASSETS} asset files")
        write_file(self._folder / asset.name, data)

    def path(self, name: str) -> Path | None:
        """The file; None when there is none or the name is no asset's."""
        if not is_asset_name(name):
            return None
        path = self._folder / name
        return path if path.is_file() and not path.is_symlink() else None

    def _holds(self, asset: AssetFile) -> bool:
        path = self.path(asset.name)
        return path is not None and path.stat().st_size == asset.size and _hash(path.read_bytes()) == asset.blake3


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()
