from __future__ import annotations

import codecs
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.errors import ConfigError, UserError
from echo2.provisioning.offers import (
    Offer,
    Terms,
    download_s,
    effective_usd_per_h,
    parse_offers,
    read_offers,
    received_gb_per_h,
)

HEADER = "name,gpu,count,usd_per_h,rollouts_per_s"
GOOD = "a,RTX5090,4,0.5,0.2"


def parse(*rows: str, header: str = HEADER) -> tuple[Offer, ...]:
    return parse_offers("\n".join([header, *rows]).encode(), "offers.csv")


def faults(*rows: str, header: str = HEADER) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(*rows, header=header)
    return caught.value.faults


def offer(**changes: Any) -> Offer:
    given = {"name": "a", "gpu": "RTX5090", "count": 4, "usd_per_h": 0.5, "rollouts_per_s": 0.2}
    return Offer(**{**given, **changes})


def test_a_row_becomes_an_offer() -> None:
    (read,) = parse(GOOD)
    assert read == offer()
    assert not read.estimated


def test_optional_columns_may_be_there_and_empty_in_any_order() -> None:
    header = (
        "reliability,name,gpu,count,usd_per_h,rollouts_per_s,traffic_usd_per_gb,uplink_mbps,downlink_mbps,min_rental_h"
    )
    first, second = parse("0.98,a,RTX5090,4,0.5,0.2,0.02,100,200,1", ",b,RTX4090,1,.4,1e-1,,,,", header=header)
    assert first == offer(
        traffic_usd_per_gb=0.02, uplink_mbps=100.0, downlink_mbps=200.0, min_rental_h=1.0, reliability=0.98
    )
    assert second == offer(name="b", gpu="RTX4090", count=1, usd_per_h=0.4, rollouts_per_s=0.1)


def test_what_a_spreadsheet_adds_is_read() -> None:
    data = codecs.BOM_UTF8 + f'{HEADER}\r\n"a, big",RTX5090,4,0.5,0.2\r\n\r\n,,,,\r\n'.encode()
    assert [read.name for read in parse_offers(data)] == ["a, big"]


@pytest.mark.parametrize(
    ("column", "text", "wanted"),
    [
        ("usd_per_h", "nan", "must be a plain number (USD per hour), got 'nan'"),
        ("usd_per_h", "-inf", "leave the whole row out if it is not known"),
        ("usd_per_h", "1e999", "must be finite (USD per hour), got 1e999"),
        ("usd_per_h", "0", "must be more than 0 (USD per hour), got 0"),
        ("usd_per_h", "0.000", "must be more than 0 (USD per hour), got 0.000"),
        ("usd_per_h", "-0.5", "must be more than 0 (USD per hour), got -0.5"),
        ("usd_per_h", "", "got nothing"),
        ("usd_per_h", "$1.2", "convert it to USD and write the number alone"),
        ("usd_per_h", "1.2 EUR", "convert it to USD and write the number alone"),
        ("usd_per_h", "1.2/h", "convert it to USD per hour and write the number alone"),
        ("usd_per_h", "1e12", "must be at most 1e+09 (USD per hour), got 1e12"),
        ("rollouts_per_s", "0", "must be more than 0 (trajectories per second), got 0"),
        ("rollouts_per_s", "-1", "must be more than 0 (trajectories per second), got -1"),
        ("rollouts_per_s", "1_000", "without separators of thousands"),
        ("rollouts_per_s", "1'000.5", "without separators of thousands"),
        ("rollouts_per_s", "١٢", "must be a plain number"),
        ("rollouts_per_s", "0x1F", "must be a plain number"),
        ("rollouts_per_s", "fast", "got 'fast'"),
        ("count", "2.5", "must be a whole number (machines), got 2.5"),
        ("count", "0", "must be at least 1 (machines), got 0"),
        ("count", "many", "must be a plain number (machines), got 'many'"),
        ("name", "", "must not be empty"),
        ("gpu", "a\x07b", "must be printable text, got 'a\\x07b'"),
    ],
)
def test_a_bad_cell_is_named_by_row_and_column(column: str, text: str, wanted: str) -> None:
    cells = dict(zip(HEADER.split(","), GOOD.split(","), strict=True))
    cells |= {"name": "b"}
    (sentence,) = faults(GOOD, ",".join((cells | {column: text}).values()))
    assert sentence.startswith(f"offers.csv, row 3, column {column}: must ")
    assert wanted in sentence


@pytest.mark.parametrize(
    ("column", "text", "wanted"),
    [
        ("downlink_mbps", "100MB/s", "that is 800 Mbps, so write 800"),
        ("downlink_mbps", "100 MBps", "that is 800 Mbps, so write 800"),
        ("downlink_mbps", "1Gbit/s", "that is 1000 Mbps, so write 1000"),
        ("uplink_mbps", "100Mbps", "that is 100 Mbps, so write 100"),
        ("uplink_mbps", "1 MiB/s", "that is 8.38861 Mbps"),
        ("uplink_mbps", "0", "must be more than 0 (Mbps)"),
        ("reliability", "98%", "write a share such as 0.98"),
        ("reliability", "98", "must be at most 1 (share of the time), got 98"),
        ("reliability", "0", "must be more than 0 (share of the time)"),
        ("reliability", "5e-324", "must be at least 1e-09 (share of the time), got 5e-324"),
        ("downlink_mbps", "5e-324", "must be at least 1e-09 (Mbps), got 5e-324"),
        ("traffic_usd_per_gb", "-0.01", "must be at least 0 (USD per GB)"),
        ("min_rental_h", "1h", "convert it to hours and write the number alone"),
        ("min_rental_h", "nan", "must be a plain number (hours)"),
    ],
)
def test_units_and_ranges_of_optional_columns_hold_too(column: str, text: str, wanted: str) -> None:
    """Field report F05."""
    (sentence,) = faults(f"{GOOD},{text}", header=f"{HEADER},{column}")
    assert sentence.startswith(f"offers.csv, row 2, column {column}: must ")
    assert wanted in sentence


def test_every_fault_of_a_file_comes_at_once() -> None:
    found = faults("a,RTX5090,4,0,0.2", "a,RTX4090,x,0.5,0.2", "c,RTX4090,1,0.5")
    assert found == [
        "offers.csv, row 4: must have 5 cells, as the header has, got 4; quote a cell that holds a comma, and write "
        "numbers without separators of thousands",
        "offers.csv, row 2, column usd_per_h: must be more than 0 (USD per hour), got 0",
        "offers.csv, row 3, column count: must be a plain number (machines), got 'x'",
        "offers.csv, row 3, column name: must be there once, got 'a' in row 2 too",
    ]


def test_a_file_that_is_wrong_everywhere_is_told_in_a_few_sentences() -> None:
    found = faults(*(f"n{index},RTX5090,1,$1,1" for index in range(1000)))
    assert len(found) == 21
    assert found[-1] == "… and 980 more faults like these"


def test_a_separator_of_thousands_that_splits_a_cell_is_told() -> None:
    (sentence,) = faults("a,RTX5090,4,1,200.5,0.2")
    assert "row 2: must have 5 cells, as the header has, got 6" in sentence
    assert "separators of thousands" in sentence


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("name,gpu,count,usd_per_h", "the column rollouts_per_s must be there"),
        (f"{HEADER},usd_per_h", "the column usd_per_h must be there once, got it twice"),
        (f"{HEADER},uplnk_mbps", "unknown column 'uplnk_mbps'; the nearest known column is uplink_mbps"),
        (f"{HEADER},colour", "unknown column 'colour'; known columns are name, gpu"),
        (
            "name,gpu,count,eur_per_h,rollouts_per_s",
            "the nearest known column is usd_per_h (convert the prices to USD)",
        ),
        (HEADER.replace(",", ";"), "columns must be separated by commas, got semicolons"),
    ],
)
def test_wrong_columns_are_named_in_row_one(header: str, wanted: str) -> None:
    found = faults(GOOD, header=header)
    assert all(sentence.startswith("offers.csv, row 1: ") for sentence in found)
    assert any(wanted in sentence for sentence in found)


@pytest.mark.parametrize("data", [b"", b"\n \n", codecs.BOM_UTF8])
def test_an_empty_file_is_refused_with_the_columns_it_needs(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"must have a row of column names, name, gpu, count.* and is empty"):
        parse_offers(data)


def test_a_header_without_rows_is_no_list() -> None:
    assert faults() == ["offers.csv must hold at least one offer below its header, got none"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_another_encoding_is_named(encoding: str) -> None:
    with pytest.raises(ConfigError, match="must be UTF-8 text, got UTF-16 or binary data; save it as CSV in UTF-8"):
        parse_offers(f"{HEADER}\n{GOOD}".encode(encoding))


def test_a_byte_that_is_no_utf8_is_found_by_row() -> None:
    with pytest.raises(ConfigError, match="offers, row 2: must be UTF-8 text, got the byte 0xe9"):
        parse_offers(f"{HEADER}\ncafé,RTX5090,4,0.5,0.2".encode("latin-1"))


def test_broken_quotes_are_found_by_row() -> None:
    with pytest.raises(ConfigError, match="row 3: must be valid CSV"):
        parse_offers(f'{HEADER}\n{GOOD}\n"b,RTX5090,1,1,1'.encode(), "offers.csv")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_offers(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="it is a folder"):
        read_offers(tmp_path)
    (tmp_path / "large.csv").write_text(f"{HEADER}\n{GOOD}\n")
    monkeypatch.setattr("echo2.provisioning.offers.MAX_FILE_BYTES", 8)
    with pytest.raises(ConfigError, match=r"must be at most 0 MB, and .*large.csv is larger"):
        read_offers(tmp_path / "large.csv")


def test_a_file_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(f"{HEADER}\na,RTX5090,0,0.5,0.2\n")
    with pytest.raises(ConfigError, match=r"^mine\.csv, row 2, column count: "):
        read_offers(tmp_path / "mine.csv")


def test_an_empty_throughput_is_estimated_where_asked_and_marked() -> None:
    rows = f"{HEADER}\n{GOOD}\nb,RTX4090,1,0.4,\n".encode()
    measured, estimated = parse_offers(rows, estimate={"RTX4090": 0.1}.__getitem__)
    assert (measured.estimated, estimated.estimated, estimated.rollouts_per_s) == (False, True, 0.1)

    def unknown(gpu: str) -> float:
        raise UserError(f"no {gpu}")

    with pytest.raises(ConfigError, match="offers, row 3, column gpu: no RTX4090"):
        parse_offers(rows, estimate=unknown)


@pytest.mark.parametrize(
    "changes",
    [
        {"usd_per_h": math.nan},
        {"usd_per_h": 0.0},
        {"rollouts_per_s": math.inf},
        {"rollouts_per_s": -1.0},
        {"count": 0},
        {"reliability": 1.5},
        {"min_rental_h": -1.0},
    ],
)
def test_no_offer_holds_a_value_that_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"offer 'a': {next(iter(changes))} must be"):
        offer(**changes)


def test_traffic_is_what_a_worker_receives_per_publish_period() -> None:
    # Qwen3-8B, 16.4 GB every 2 · 1631.2 s: 1.1035 publishes/h, 18.1 GB/h
    gb_per_h = received_gb_per_h(bytes_per_publish=16.4e9, t_train_s=1631.2, publish_period=2)
    assert gb_per_h == pytest.approx(18.097, abs=1e-3)
    # at 0.02 USD/GB: 0.36 USD/h on top of 0.50
    assert effective_usd_per_h(offer(traffic_usd_per_gb=0.02), Terms(gb_per_h)) == pytest.approx(0.8619, abs=1e-4)
    assert effective_usd_per_h(offer(), Terms(gb_per_h)) == 0.5


def test_a_rental_shorter_than_the_minimum_is_billed_in_full() -> None:
    assert effective_usd_per_h(offer(min_rental_h=3.0), Terms(rental_h=2.0)) == 0.75
    assert effective_usd_per_h(offer(min_rental_h=3.0), Terms(rental_h=4.0)) == 0.5


def test_downtime_lowers_what_is_expected_of_a_machine() -> None:
    assert offer(reliability=0.9).expected_rollouts_per_s == pytest.approx(0.18)


def test_a_download_takes_its_bits_over_the_downlink() -> None:
    assert download_s(offer(downlink_mbps=1000.0), 16e9) == 128.0
    assert download_s(offer(), 16e9) is None


@pytest.mark.parametrize("values", [{"received_gb_per_h": -1.0}, {"received_gb_per_h": math.nan}, {"rental_h": 0.0}])
def test_impossible_terms_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Terms(**values)


@pytest.mark.parametrize(("size", "t_train_s"), [(-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)])
def test_impossible_publishes_are_refused(size: float, t_train_s: float) -> None:
    with pytest.raises(UserError):
        received_gb_per_h(bytes_per_publish=size, t_train_s=t_train_s, publish_period=2)


@given(st.text(max_size=60))
def test_any_text_is_an_offer_list_or_a_sentence(text: str) -> None:
    for data in (text, f"{HEADER}\n{text}", f"{HEADER}\na,RTX5090,4,{text},0.2"):
        try:
            read = parse_offers(data.encode("utf-8", "surrogatepass"))
        except ConfigError as error:
            sentences = error.faults
        else:
            sentences = ["none"]
            assert all(0 < one.usd_per_h < math.inf and 0 < one.rollouts_per_s < math.inf for one in read)
        assert all(sentences)
