"""SkyPilot's catalog files on this machine, and how old their prices are.

Invariant: a price is never taken to be newer than its download. Where SkyPilot cannot fetch a catalog it marks the old
file as new (``sky/catalog/common.py`` sets its time of change), so that time alone proves nothing. The checksum beside
it, ``.meta/CLOUD/vms.csv.md5``, is written on a download and at no other time: where it fits the file, its time counts;
where it does not, a person changed the file, and the time of that change counts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from echo2.provisioning.prices.quotes import Quote
from echo2.provisioning.prices.skypilot import MAX_FILE_BYTES, parse_catalog
from echo2.provisioning.table import read_file

_LARGEST_CHECKSUM = 1024


class Prices(msgspec.Struct, frozen=True):
    """Of one cloud."""

    quotes: tuple[Quote, ...]
    """On demand and spot."""
    fetched_s: float
    """When they were true, in seconds since the epoch."""


class CatalogFiles:
    """Reads each file again only when it changed: the largest take seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """``~/.sky/catalogs/v8``"""
        self._read: dict[str, tuple[float, Prices]] = {}
        """By cloud, with the file's time of change."""

    def has(self, cloud: str) -> bool:
        return (self.folder / cloud / "vms.csv").is_file()

    def prices(self, cloud: str) -> Prices:
        """Raises ConfigError when there is no such file or it is no catalog."""
        path = self.folder / cloud / "vms.csv"
        changed_s = path.stat().st_mtime if path.is_file() else 0.0
        held = self._read.get(cloud)
        if held is None or held[0] != changed_s:
            data = read_file(path, "a SkyPilot catalog", MAX_FILE_BYTES)
            quotes = [quote for spot in (False, True) for quote in parse_catalog(data, cloud, spot=spot).quotes]
            held = changed_s, Prices(tuple(quotes), min(changed_s, self._fetched_s(cloud, data, changed_s)))
            self._read[cloud] = held
        return held[1]

    def _fetched_s(self, cloud: str, data: bytes, changed_s: float) -> float:
        mark = self.folder / ".meta" / cloud / "vms.csv.md5"
        try:
            written = mark.read_bytes()[:_LARGEST_CHECKSUM].decode("ascii", "replace").strip()
            fetched_s = mark.stat().st_mtime
        except OSError:
            return changed_s  # no download is known of: the file was put there
        fits = written == hashlib.md5(data, usedforsecurity=False).hexdigest()
        return fetched_s if fits else changed_s
