"""Rows are made up, in the shape of SkyPilot's catalog v8."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.errors import ConfigError
from echo2.provisioning.prices.skypilot import parse_catalog, read_catalog

VAST = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region\n"
    "2x-5090,RTX5090,2,32,64.0,\"{'Gpus': [], 'TotalGpuMemoryInMiB': 65214}\",0.80,0.00,\"Utah, US, NA\"\n"
    "2x-5090,RTX5090,2,32,64.0,\"{'Gpus': [], 'TotalGpuMemoryInMiB': 65214}\",0.75,0.00,\"Utah, US, NA\"\n"
    "2x-5090,RTX5090,2,32,64.0,\"{'Gpus': [], 'TotalGpuMemoryInMiB': 65214}\",0.000,0.00,\"Utah, US, NA\"\n"
    "1x-a100-pcie,A100,1,32,64.0,\"{'Gpus': [], 'TotalGpuMemoryInMiB': 81920}\",0.90,0.00,\"Oslo, NO, EU\"\n"
    "1x-a100-sxm,A100,1,32,64.0,\"{'Gpus': [], 'TotalGpuMemoryInMiB': 40960}\",0.70,0.00,\"Oslo, NO, EU\"\n"
    '1x-l40s,L40S,1,32,64.0,,n/a,0.00,"Oslo, NO, EU"\n'
)
GCP = (
    "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice\n"
    "a2-highgpu-1g,12.0,85.0,,,,us-x1,us-x1-a,0.7,0.3\n"
    "a2-highgpu-1g,12.0,85.0,,,,us-x1,us-x1-b,0.6,0.3\n"
    "n2-standard-8,8.0,32.0,,,,us-x1,us-x1-a,0.4,0.1\n"
    "g2-standard-4,4.0,16.0,L4,1.0,L4,us-x1,us-x1-a,0.71,0.28\n"
    ",,,A100,1,A100,us-x1,us-x1-a,2.9,0.9\n"
    ",,,A100,1,A100,us-x1,us-x1-b,2.9,\n"
    ",,,A100,2,A100,us-x1,us-x1-a,5.8,1.8\n"
    ",,,tpu-v5litepod-8,1,tpu,us-x1,us-x1-a,9.6,2.0\n"
)


def test_a_machine_has_the_cheapest_price_of_its_region_and_zero_is_unknown() -> None:
    """Field report I01."""
    catalog = parse_catalog(VAST.encode(), "vast")
    prices = {(quote.gpu, quote.gpus): quote.usd_per_h for quote in catalog.quotes}
    assert prices == {("RTX5090", 2): 0.75, ("A100-80GB", 1): 0.90, ("A100-40GB", 1): 0.70}
    assert catalog.left_out == (
        "vast/vms.csv: 2 left out: Price is missing, zero or no number, so the price is unknown",
    )


def test_a_quote_says_where_it_comes_from() -> None:
    (quote,) = (q for q in parse_catalog(VAST.encode(), "vast").quotes if q.gpu == "RTX5090")
    assert quote.name == "vast/2x-5090/RTX5090:2/Utah, US, NA"
    assert (quote.provider, quote.region, quote.spot) == ("vast", "Utah, US, NA", False)
    assert quote.source == "SkyPilot catalog, vast/vms.csv, row 3"


def test_google_cloud_bills_the_machine_and_its_gpus_apart() -> None:
    catalog = parse_catalog(GCP.encode(), "gcp")
    prices = {quote.name: quote.usd_per_h for quote in catalog.quotes}
    assert prices == {
        "gcp/a2-highgpu-1g/A100:1/us-x1": pytest.approx(3.5),
        "gcp/g2-standard-4/L4:1/us-x1": pytest.approx(0.71),
    }
    assert catalog.left_out == (
        "gcp/vms.csv: 2 left out: the GPU's price is there without that of the machine that carries it",
    )


def test_spot_prices_are_read_where_asked() -> None:
    catalog = parse_catalog(GCP.encode(), "gcp", spot=True)
    (quote,) = (q for q in catalog.quotes if q.gpu == "A100-40GB")
    assert (quote.usd_per_h, quote.spot) == (pytest.approx(1.2), True)
    assert not parse_catalog(VAST.encode(), "vast", spot=True).quotes  # 0.00 there means that there are none


def test_a_folder_of_clouds_or_of_one_is_read(tmp_path: Path) -> None:
    for cloud, text in (("vast", VAST), ("gcp", GCP)):
        (tmp_path / cloud).mkdir()
        (tmp_path / cloud / "vms.csv").write_text(text)
    assert [quote.provider for quote in read_catalog(tmp_path).quotes] == ["gcp"] * 2 + ["vast"] * 3
    assert {quote.provider for quote in read_catalog(tmp_path / "vast").quotes} == {"vast"}


def test_what_is_no_catalog_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a folder with CLOUD/vms.csv in it, and .* has none"):
        read_catalog(tmp_path)
    with pytest.raises(ConfigError, match=r"vast/vms.csv, row 1: the columns InstanceType, .* must be there"):
        parse_catalog(b"name,price\na,1\n", "vast")


def test_rows_that_do_not_fit_are_left_out_and_counted() -> None:
    catalog = parse_catalog((VAST + "odd,row\nx,RTX4090,some,1,1,,0.4,0,here\n").encode(), "vast")
    assert "vast/vms.csv: 1 left out: rows that do not fit the header" in catalog.left_out
    assert "vast/vms.csv: 1 left out: AcceleratorCount is no whole number of GPUs" in catalog.left_out
