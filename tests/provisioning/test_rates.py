from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.provisioning.rates import WINDOW, DeliveryRate, Ledger


def deliver(rate: DeliveryRate, times: list[float], rows: int) -> DeliveryRate:
    for now_s in times:
        rate = rate.delivered(now_s, rows)
    return rate


def test_a_worker_that_delivered_nothing_counts_for_nothing() -> None:
    assert DeliveryRate(opened_s=10.0).rate_per_s(20.0) == 0.0


def test_the_rate_is_rows_over_the_time_since_the_window_opened() -> None:
    rate = deliver(DeliveryRate(opened_s=100.0), [104.0, 108.0, 112.0], rows=8)
    assert rate.rate_per_s(112.0) == 2.0


def test_the_rate_of_a_silent_worker_falls() -> None:
    rate = deliver(DeliveryRate(opened_s=0.0), [4.0, 8.0], rows=8)
    assert rate.rate_per_s(16.0) == 1.0


def test_only_the_last_deliveries_count() -> None:
    slow = deliver(DeliveryRate(opened_s=0.0), [100.0 * i for i in range(1, 11)], rows=8)
    quick = deliver(slow, [1000.0 + 2.0 * i for i in range(1, WINDOW + 1)], rows=8)
    assert len(quick.deliveries) == WINDOW
    assert quick.rate_per_s(1000.0 + 2.0 * WINDOW) == pytest.approx(4.0)


def test_time_held_by_the_lease_gate_does_not_lower_the_rate() -> None:
    rate = DeliveryRate(opened_s=0.0).delivered(4.0, 8).held(6.0).delivered(14.0, 8)
    assert rate.rate_per_s(14.0) == 2.0


def test_a_clock_that_stands_still_gives_no_infinite_rate() -> None:
    assert DeliveryRate(opened_s=5.0).delivered(5.0, 8).rate_per_s(5.0) == 0.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 1e4), st.integers(1, 64)), min_size=1, max_size=80), st.floats(0, 1e4))
def test_the_rate_lies_between_zero_and_the_fastest_delivery(gaps: list[tuple[float, int]], silence_s: float) -> None:
    rate, now_s = DeliveryRate(opened_s=0.0), 0.0
    for gap_s, rows in gaps:
        now_s += gap_s
        rate = rate.delivered(now_s, rows)
    fastest = max(rows / gap_s for gap_s, rows in gaps)
    assert 0 < rate.rate_per_s(now_s + silence_s) <= fastest * 1.001


def test_cost_is_price_times_time_over_all_rentals() -> None:
    ledger = Ledger().rent("learner", 20.0, 0.0).rent("w1", 0.5, 1800.0)
    assert ledger.usd_per_h == 20.5
    assert ledger.total_usd(3600.0) == pytest.approx(20.25)


def test_a_released_machine_costs_no_more() -> None:
    ledger = Ledger().rent("w1", 1.0, 0.0).release("w1", 1800.0).release("never-rented", 1800.0)
    assert (ledger.total_usd(7200.0), ledger.usd_per_h) == (0.5, 0.0)


def test_a_change_of_price_settles_what_was_due() -> None:
    ledger = Ledger().rent("w1", 1.0, 0.0).rent("w1", 3.0, 3600.0)
    assert ledger.total_usd(7200.0) == pytest.approx(4.0)


def test_a_restart_keeps_what_was_spent() -> None:
    assert Ledger(settled_usd=7.5).rent("w1", 2.0, 50.0).total_usd(50.0 + 1800.0) == 8.5


@pytest.mark.parametrize("usd_per_h", [-0.1, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(usd_per_h: float) -> None:
    with pytest.raises(UserError, match="price of w1"):
        Ledger().rent("w1", usd_per_h, 0.0)
