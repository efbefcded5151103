from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from echo2.errors import ConfigError, UserError
from echo2.provisioning.gpus import GPUS
from echo2.provisioning.prices.quotes import PRICE_LIST, Quote, parse_quotes, price_list

HEADER = "name,provider,gpu,gpus,usd_per_gpu_h,collected,assumption,source"


def test_the_committed_list_holds_every_gpu_at_both_providers_where_they_rent_it() -> None:
    at: dict[str, set[str]] = {"gcp": set(), "vast": set()}
    for quote in price_list():
        at[quote.provider].add(quote.gpu)
    assert at["vast"] == set(GPUS)
    assert at["gcp"] == {"A100-40GB", "A100-80GB", "H100", "H200"}


def test_every_committed_price_has_a_source_and_assumptions_say_why() -> None:
    for quote in price_list():
        assert len(quote.source) > 10, quote.name
        if quote.assumption:
            assert "memory" in quote.source or "no figure" in quote.source, quote.name


def test_a_committed_price_is_that_of_the_whole_machine() -> None:
    prices = {quote.name: quote.usd_per_h for quote in price_list()}
    assert prices["vast-rtx5090-16x"] == pytest.approx(16 * 0.43)
    assert prices["gcp-a100-40gb"] == 3.67


def test_the_list_is_among_the_files_that_are_installed() -> None:
    assert files("echo2.provisioning.prices").joinpath(PRICE_LIST).is_file()
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert "*.csv" in project["tool"]["setuptools"]["package-data"]["*"]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ("a,p,RTX5090,1,0,,no,s", "row 2, column usd_per_gpu_h: must be more than 0"),
        ("a,p,RTX5090,1.5,1,,no,s", "row 2, column gpus: must be a whole number"),
        ("a,p,RTX5090,1,1,,maybe,s", "row 2, column assumption: must be yes or no, got 'maybe'"),
        ("a,p,RTX5090,1,1,,no,", "row 2, column source: must not be empty"),
    ],
)
def test_a_bad_price_is_named_by_row_and_column(row: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_quotes(f"{HEADER}\n{row}".encode())
    assert wanted in str(caught.value)


def test_a_doubled_name_is_refused() -> None:
    row = "a,p,RTX5090,1,1,,no,s"
    with pytest.raises(ConfigError, match="row 3, column name: must be new, got 'a' again"):
        parse_quotes(f"{HEADER}\n{row}\n{row}".encode())


def test_a_price_of_nothing_is_no_quote() -> None:
    """Field report I01."""
    with pytest.raises(UserError, match="quote 'a': usd_per_h must be more than 0"):
        Quote(name="a", provider="p", gpu="RTX5090", gpus=1, usd_per_h=0.0)
