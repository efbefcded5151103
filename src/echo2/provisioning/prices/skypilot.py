"""Prices from a local copy of SkyPilot's catalog (``~/.sky/catalogs/v8`` or a checkout of its repository).

Invariant: a row whose price is missing, zero or unreadable is left out and said so, never taken as free; nothing is
fetched. A file that is not a catalog is refused.

The files are ``CLOUD/vms.csv`` with the columns InstanceType, AcceleratorName, AcceleratorCount, Price, Region and,
mostly, vCPUs, MemoryGiB, GpuInfo, SpotPrice, AvailabilityZone, in any order. A price is that of the whole machine, in
USD per hour. Google Cloud is different: a row without InstanceType is the price of GPUs alone, and the machine that
carries them, in a row without AcceleratorName, comes on top.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from echo2.errors import ConfigError
from echo2.provisioning.cells import BadCell
from echo2.provisioning.gpus import market_name
from echo2.provisioning.prices.quotes import GPUS_PER_MACHINE, USD_PER_H, Quote
from echo2.provisioning.table import Columns, Row, parse_table, read_file

MAX_FILE_BYTES = 128_000_000
"""The largest of the catalog's files are some 20 MB."""
_COLUMNS = Columns(
    ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region"),
    ("SpotPrice", "AvailabilityZone", "GpuInfo"),
    others_pass=True,
)
_HOSTS: Mapping[str, str] = {
    "A100": "a2-highgpu-{}g",
    "A100-80GB": "a2-ultragpu-{}g",
    "H100": "a3-highgpu-{}g",
    "H100-MEGA": "a3-megagpu-{}g",
    "H200": "a3-ultragpu-{}g",
}
"""The machine type of Google Cloud that carries so many of a GPU."""
_TOTAL_MEMORY = re.compile(r"TotalGpuMemoryInMiB'?\"?: *(\d+(?:\.\d*)?)")
_SMALLEST_MIB = 1000.0
"""Some clouds fill in GiB; no GPU has less than this many MiB."""


class Catalog(msgspec.Struct, frozen=True):
    quotes: tuple[Quote, ...]
    """The cheapest zone of each (cloud, machine, region), by name."""
    left_out: tuple[str, ...]
    """A sentence for each kind of row that could not be used, with how many there were."""


def read_catalog(folder: Path, *, spot: bool = False) -> Catalog:
    """All machines with GPUs of every ``CLOUD/vms.csv`` below ``folder`` (or of ``folder/vms.csv`` itself).

    ``spot`` reads SpotPrice in place of Price. Raises ConfigError when there is no such file or one is no catalog.
    """
    paths = [folder / "vms.csv"] if (folder / "vms.csv").is_file() else sorted(folder.glob("*/vms.csv"))
    if not paths:
        raise ConfigError(
            f"a SkyPilot catalog must be a folder with CLOUD/vms.csv in it, and {folder} has none: give the folder of "
            "one schema version, such as catalogs/v8"
        )
    parts = [
        parse_catalog(read_file(path, "a SkyPilot catalog", MAX_FILE_BYTES), path.resolve().parent.name, spot=spot)
        for path in paths
    ]
    return Catalog(
        tuple(quote for part in parts for quote in part.quotes),
        tuple(sentence for part in parts for sentence in part.left_out),
    )


def parse_catalog(data: bytes, cloud: str, *, spot: bool = False) -> Catalog:
    """The machines of one ``vms.csv``. Raises ConfigError for text that is no catalog."""
    origin = f"{cloud}/vms.csv"
    table = parse_table(data, origin, _COLUMNS)
    column = "SpotPrice" if spot else "Price"
    hosts = _host_prices(table.rows, column)
    cheapest: dict[str, Quote] = {}
    left_out = Counter("rows that do not fit the header" for _ in table.faults)
    for row in table.rows:
        if not row.cells["AcceleratorName"]:
            continue
        try:
            quote = _quote(row, cloud, column, hosts)
        except BadCell as error:
            left_out[str(error)] += 1
            continue
        if quote.name not in cheapest or quote.usd_per_h < cheapest[quote.name].usd_per_h:
            cheapest[quote.name] = quote
    sentences = (f"{origin}: {number} left out: {reason}" for reason, number in sorted(left_out.items()))
    return Catalog(tuple(cheapest[name] for name in sorted(cheapest)), tuple(sentences))


def _host_prices(rows: Sequence[Row], column: str) -> dict[tuple[str, str], float]:
    """Price of machines without GPUs by (machine, zone)."""
    prices: dict[tuple[str, str], float] = {}
    for row in rows:
        if not row.cells["AcceleratorName"] and row.cells["InstanceType"]:
            try:
                prices[row.cells["InstanceType"], _zone(row)] = USD_PER_H.read(row.cells.get(column, ""))
            except BadCell:
                continue  # its GPUs are left out, with the reason
    return prices


def _quote(row: Row, cloud: str, column: str, hosts: Mapping[tuple[str, str], float]) -> Quote:
    """Raises BadCell with why the row cannot be used."""
    accelerator = row.cells["AcceleratorName"]
    try:
        gpus = int(GPUS_PER_MACHINE.read(row.cells["AcceleratorCount"]))
    except BadCell:
        raise BadCell("AcceleratorCount is no whole number of GPUs") from None
    try:
        usd_per_h = USD_PER_H.read(row.cells.get(column, ""))
    except BadCell:
        raise BadCell(f"{column} is missing, zero or no number, so the price is unknown") from None
    machine = row.cells["InstanceType"]
    if not machine:
        machine = _HOSTS.get(accelerator, "").format(gpus)
        if (machine, _zone(row)) not in hosts:
            raise BadCell("the GPU's price is there without that of the machine that carries it")
        usd_per_h += hosts[machine, _zone(row)]
    region = row.cells["Region"]
    return Quote(
        name=f"{cloud}/{machine}/{accelerator}:{gpus}/{region}" + ("/spot" if column == "SpotPrice" else ""),
        provider=cloud,
        gpu=market_name(accelerator, _memory_gb(row.cells.get("GpuInfo", ""), gpus)),
        gpus=gpus,
        usd_per_h=usd_per_h,
        machine=machine,
        accelerator=accelerator,
        region=region,
        spot=column == "SpotPrice",
        source=f"SkyPilot catalog, {cloud}/vms.csv, row {row.number}",
    )


def _zone(row: Row) -> str:
    return row.cells.get("AvailabilityZone") or row.cells["Region"]


def _memory_gb(info: str, gpus: int) -> float | None:
    """Memory of one GPU; None where the row does not say."""
    if not (found := _TOTAL_MEMORY.search(info)):
        return None
    each = float(found.group(1)) / gpus
    mib = each if each >= _SMALLEST_MIB else each * 1024
    return mib * 2**20 / 1e9
