from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_sky import CATALOGS

from echo2.errors import UserError
from echo2.provisioning.estimate import Workload, rollouts_per_s
from echo2.provisioning.pools.skypilot_clusters import check_machine_id
from echo2.provisioning.pools.skypilot_market import MOST_CHARACTERS, Rentable, offer_name, rentals
from echo2.provisioning.prices.quotes import Quote
from echo2.provisioning.prices.skypilot import parse_catalog

QUOTES = (
    *parse_catalog(CATALOGS["gcp/vms.csv"].encode(), "gcp").quotes,
    *parse_catalog(CATALOGS["gcp/vms.csv"].encode(), "gcp", spot=True).quotes,
    *parse_catalog(CATALOGS["vast/vms.csv"].encode(), "vast").quotes,
)
WORKLOAD = Workload(parameters=8.2e9, kv_bytes_per_token=147456, prompt_tokens=200, reply_tokens=3500, group_size=16)


def test_only_what_was_asked_for_is_offered() -> None:
    wanted = [Rentable(cloud="gcp", gpu="A100", spot=True, count=4, rollouts_per_s=0.25)]
    (rental,) = rentals(QUOTES, wanted).values()
    assert rental.offer.name == "gcp-a2-highgpu-1g-us-x1-spot"
    assert (rental.offer.gpu, rental.offer.count, rental.offer.rollouts_per_s) == ("A100-40GB", 4, 0.25)
    assert rental.offer.usd_per_h == pytest.approx(1.2)
    assert not rental.offer.estimated
    assert (rental.infra, rental.quote.machine, rental.quote.accelerator) == ("gcp/us-x1", "a2-highgpu-1g", "A100")


@pytest.mark.parametrize("gpu", ["A100-40GB", "A100", "a100"])
def test_a_gpu_may_be_called_by_our_name_or_the_markets(gpu: str) -> None:
    assert len(rentals(QUOTES, [Rentable(cloud="gcp", gpu=gpu, rollouts_per_s=1.0)])) == 1


def test_regions_and_sizes_that_were_not_asked_for_are_left() -> None:
    elsewhere = Rentable(cloud="vast", gpu="RTX5090", region="Oslo, NO, EU", rollouts_per_s=1.0)
    larger = Rentable(cloud="vast", gpu="RTX5090", gpus=2, rollouts_per_s=1.0)
    assert not rentals(QUOTES, [elsewhere, larger])


def test_a_throughput_that_nobody_measured_is_estimated_and_marked() -> None:
    (rental,) = rentals(QUOTES, [Rentable(cloud="vast", gpu="RTX5090")], WORKLOAD).values()
    assert rental.offer.estimated
    assert rental.offer.rollouts_per_s == rollouts_per_s(WORKLOAD, "RTX5090")


def test_a_throughput_must_come_from_somewhere() -> None:
    with pytest.raises(UserError, match=r"RTX5090 of vast must have a throughput: give rollouts_per_s"):
        rentals(QUOTES, [Rentable(cloud="vast", gpu="RTX5090")])


def test_of_two_spellings_of_one_machine_the_dearer_price_stands() -> None:
    one = QUOTES[-1]
    other = msgspec.structs.replace(one, name="vast/1X-5090", machine="1X_5090", usd_per_h=0.9)
    wanted = [Rentable(cloud="vast", gpu="RTX5090", rollouts_per_s=1.0)]
    for quotes in ((one, other), (other, one)):
        (rental,) = rentals(quotes, wanted).values()
        assert rental.offer.usd_per_h == 0.9


@given(st.text(max_size=80), st.text(max_size=40), st.booleans())
def test_every_offer_can_name_a_machine_of_every_cloud(machine: str, region: str, spot: bool) -> None:
    quote = Quote(
        name=f"aws/{machine}/{region}/{spot}",
        provider="aws",
        gpu="H100",
        gpus=1,
        usd_per_h=1.0,
        machine=machine,
        region=region,
        spot=spot,
    )
    name = offer_name(quote)
    assert len(name) <= MOST_CHARACTERS
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    check_machine_id(f"{name}-1234567890")


def test_long_names_that_begin_alike_stay_apart() -> None:
    quotes = [
        msgspec.structs.replace(QUOTES[0], name=f"{zone}", machine="m" * 60, region=zone) for zone in ("a", "b", "c")
    ]
    assert len({offer_name(quote) for quote in quotes}) == 3


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"cloud": "Google Cloud", "gpu": "A100"}, "a cloud must be named as in SkyPilot's catalog"),
        ({"cloud": "gcp", "gpu": ""}, "must have a GPU"),
        ({"cloud": "gcp", "gpu": "A100", "count": 0}, "count of gcp A100 must be at least 1, got 0"),
        ({"cloud": "gcp", "gpu": "A100", "gpus": 0}, "gpus of gcp A100 must be at least 1, got 0"),
    ],
)
def test_what_names_no_machine_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Rentable(**fields)  # type: ignore[arg-type]
