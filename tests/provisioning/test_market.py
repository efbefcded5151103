"""The policies beside each other on the committed price list and on large random markets."""

from __future__ import annotations

import time
from random import Random

import pytest

from echo2.provisioning.estimate import Workload, estimated_offers, kv_bytes_per_token
from echo2.provisioning.offers import Offer
from echo2.provisioning.prices.quotes import price_list
from echo2.provisioning.selection import cheapest, exact, greedy, within_budget

QWEN3_8B = Workload(
    parameters=8.2e9,
    kv_bytes_per_token=kv_bytes_per_token(layers=36, kv_heads=8, head_dim=128),
    prompt_tokens=200,
    reply_tokens=4000,
    group_size=16,
)


def large_market(seed: int, size: int = 10_000) -> list[Offer]:
    draw = Random(seed)
    offers = []
    for index in range(size):
        rate = draw.uniform(0.05, 3.0)
        usd_per_h = rate * draw.lognormvariate(1.0, 0.4)
        offers.append(
            Offer(
                name=f"o{index}",
                gpu="G",
                count=draw.randint(1, 20),
                usd_per_h=round(usd_per_h, 4),
                rollouts_per_s=round(rate, 4),
            )
        )
    return offers


def test_the_cheapest_is_within_one_percent_of_the_optimum_on_the_committed_prices() -> None:
    pytest.importorskip("scipy")
    offers, left_out = estimated_offers(price_list(), QWEN3_8B, count=16)
    assert not left_out
    for tenths in (1, 3, 7, 11, 21, 23, 55, 148, 400):
        optimum = exact(offers, tenths / 10).usd_per_h
        assert optimum * (1 - 1e-9) <= cheapest(offers, tenths / 10).usd_per_h <= optimum * 1.01


def test_ten_thousand_offers_are_answered_at_once() -> None:
    """50 ms are promised; a test machine may be busy: processor time, the best of several tries, with room."""
    offers = large_market(1)
    for question, number in ((cheapest, 2.31), (cheapest, 500.0), (cheapest, 60_000.0), (within_budget, 1000.0)):
        fastest = min(_seconds(question, offers, number) for _ in range(5))
        assert fastest < 0.2, (question.__name__, number, fastest)


def test_in_a_large_market_the_cheapest_is_within_one_percent_of_the_optimum() -> None:
    pytest.importorskip("scipy")
    offers = large_market(2)
    for target in (0.2, 2.31, 20.0, 500.0):
        optimum = exact(offers, target).usd_per_h
        assert optimum * (1 - 1e-9) <= cheapest(offers, target).usd_per_h <= optimum * 1.01


def test_large_markets_leave_little_between_the_policies() -> None:
    offers = large_market(2)
    for target in (2.31, 50.0, 5000.0):
        rho = min(one.usd_per_h / one.rollouts_per_s for one in offers)
        chosen = cheapest(offers, target)
        assert target * rho <= chosen.usd_per_h <= greedy(offers, target).usd_per_h * (1 + 1e-9)


def _seconds(question: object, offers: list[Offer], number: float) -> float:
    assert callable(question)
    began = time.process_time()
    question(offers, number)
    return time.process_time() - began
