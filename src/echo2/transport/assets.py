"""Names and sizes of a model's small files (configuration, tokenizer) on the wire and on disk.

Invariant (E03): a name that passes is a plain file name: it cannot leave the folder it is joined to, and it is no name
that this package gives to unfinished files.
"""

from __future__ import annotations

import re

from echo2.durable import ASIDE
from echo2.errors import Malformed
from echo2.transport.messages import AssetFile

MAX_ASSETS = 64
MAX_ASSET_BYTES = 64 * 1024 * 1024
"""The largest tokenizer files are about 35 MB."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HASH = re.compile(r"[0-9a-f]{64}")


def is_asset_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not name.endswith(ASIDE)


def check_asset(asset: AssetFile) -> None:
    """Raises Malformed for a name that is no plain file name, a size out of range, or a hash that is none."""
    if not is_asset_name(asset.name):
        raise Malformed(f"an asset's name is letters, digits, '.', '_' and '-', got {asset.name[:80]!r}")
    if not 0 <= asset.size <= MAX_ASSET_BYTES:
        raise Malformed(f"asset {asset.name} must have at most {MAX_ASSET_BYTES} bytes, got {asset.size}")
    if not _HASH.fullmatch(asset.blake3):
        raise Malformed(f"asset {asset.name} must have a blake3 hash, got {asset.blake3[:80]!r}")
