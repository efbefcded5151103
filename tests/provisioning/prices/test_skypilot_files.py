from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from scripted_sky import CATALOGS, write_catalogs

from echo2.errors import ConfigError
from echo2.provisioning.prices.skypilot_files import CatalogFiles

TEXT = CATALOGS["gcp/vms.csv"]
MONDAY_S, TUESDAY_S, WEDNESDAY_S = 1e9, 1e9 + 86400, 1e9 + 2 * 86400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_catalogs(tmp_path)
    os.utime(tmp_path / "gcp" / "vms.csv", (MONDAY_S, MONDAY_S))
    return tmp_path


def checksum(folder: Path, text: str, at_s: float) -> None:
    mark = folder / ".meta" / "gcp" / "vms.csv.md5"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(hashlib.md5(text.encode()).hexdigest())
    os.utime(mark, (at_s, at_s))


def test_prices_are_those_on_demand_and_spot_and_as_old_as_the_file(folder: Path) -> None:
    prices = CatalogFiles(folder).prices("gcp")
    assert [(quote.machine, quote.accelerator, quote.spot) for quote in prices.quotes] == [
        ("a2-highgpu-1g", "A100", False),
        ("a2-highgpu-1g", "A100", True),
    ]
    assert [quote.usd_per_h for quote in prices.quotes] == pytest.approx([3.6, 1.2])
    assert prices.fetched_s == MONDAY_S


def test_a_file_that_was_only_marked_as_new_is_as_old_as_its_download(folder: Path) -> None:
    """SkyPilot does so when it cannot fetch a catalog."""
    checksum(folder, TEXT, MONDAY_S)
    os.utime(folder / "gcp" / "vms.csv", (WEDNESDAY_S, WEDNESDAY_S))
    assert CatalogFiles(folder).prices("gcp").fetched_s == MONDAY_S


def test_a_file_that_a_person_changed_is_as_old_as_the_change(folder: Path) -> None:
    checksum(folder, "what was downloaded", MONDAY_S)
    os.utime(folder / "gcp" / "vms.csv", (TUESDAY_S, TUESDAY_S))
    assert CatalogFiles(folder).prices("gcp").fetched_s == TUESDAY_S


def test_a_file_is_read_again_when_it_changed_and_not_before(folder: Path) -> None:
    files = CatalogFiles(folder)
    first = files.prices("gcp")
    assert files.prices("gcp") is first
    path = folder / "gcp" / "vms.csv"
    path.write_text(TEXT.replace("2.9", "1.9"))
    os.utime(path, (TUESDAY_S, TUESDAY_S))
    assert files.prices("gcp").quotes[0].usd_per_h == pytest.approx(2.6)


def test_a_cloud_without_a_catalog_is_named(folder: Path) -> None:
    files = CatalogFiles(folder)
    assert files.has("gcp") and not files.has("aws")
    with pytest.raises(ConfigError, match=r"aws/vms\.csv: there is no such file"):
        files.prices("aws")
