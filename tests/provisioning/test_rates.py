from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.provisioning.rates import WINDOW, DeliveryRate, Estimate, pooled, stated

TEN_MINUTES_S = 600.0


def deliver(rate: DeliveryRate, times: list[float], rows: int) -> DeliveryRate:
    for now_s in times:
        rate = rate.delivered(now_s, rows)
    return rate


def every(gap_s: float, count: int, start_s: float = 0.0) -> list[float]:
    return [start_s + gap_s * number for number in range(1, count + 1)]


def test_a_worker_that_delivered_nothing_and_of_which_nobody_said_anything_counts_for_nothing() -> None:
    assert DeliveryRate(opened_s=10.0).rate_per_s(20.0) == 0.0


def test_the_rate_is_rows_over_the_time_since_the_window_opened() -> None:
    rate = deliver(DeliveryRate(opened_s=100.0), [104.0, 108.0, 112.0], rows=8)
    assert rate.rate_per_s(112.0) == 2.0


def test_the_rate_of_a_silent_worker_falls() -> None:
    rate = deliver(DeliveryRate(opened_s=0.0), [4.0, 8.0], rows=8)
    assert rate.rate_per_s(16.0) == pytest.approx(1.0, rel=0.05)


def test_only_the_last_deliveries_count() -> None:
    slow = deliver(DeliveryRate(opened_s=0.0), every(100.0, 10), rows=8)
    quick = deliver(slow, every(2.0, WINDOW, start_s=1000.0), rows=8)
    assert len(quick.deliveries) == WINDOW
    assert quick.rate_per_s(1000.0 + 2.0 * WINDOW) == pytest.approx(4.0)


def test_time_held_by_the_lease_gate_does_not_lower_the_rate() -> None:
    rate = DeliveryRate(opened_s=0.0).delivered(4.0, 8).held(6.0).delivered(14.0, 8)
    assert rate.rate_per_s(14.0) == 2.0


def test_time_before_the_first_lease_is_no_work() -> None:
    rate = DeliveryRate().held(30.0).given_work(300.0).given_work(302.0).delivered(304.0, 8)
    assert rate.rate_per_s(304.0) == 2.0


def test_a_clock_that_stands_still_gives_no_infinite_rate() -> None:
    assert DeliveryRate(opened_s=5.0).delivered(5.0, 8).rate_per_s(5.0) == 0.0
    assert deliver(DeliveryRate(opened_s=5.0), [5.0, 5.0, 5.0], rows=8).estimate(5.0) == Estimate()


def test_until_something_comes_the_offers_rate_counts_and_fades_with_silence() -> None:
    # 8 rows per group and 0.08 rows/s: a group every 100 s; two groups' weight of belief
    rate = DeliveryRate(prior_per_s=0.08, rows_per_delivery=8.0)
    assert rate.rate_per_s(1e6) == pytest.approx(0.08), "no work yet"
    assert rate.given_work(0.0).rate_per_s(200.0) == pytest.approx(0.04)
    assert rate.given_work(0.0).rate_per_s(600.0) == pytest.approx(0.02)


def test_silence_says_nothing_while_the_first_group_cannot_be_there_yet() -> None:
    rate = DeliveryRate(prior_per_s=0.08, rows_per_delivery=8.0, lead_s=300.0).given_work(0.0)
    assert rate.rate_per_s(300.0) == pytest.approx(0.08)
    assert rate.rate_per_s(500.0) == pytest.approx(0.04)


def test_a_worker_that_delivers_a_group_every_ten_minutes_is_not_dead_and_its_estimate_is_not_noise() -> None:
    draw = Random(7)
    times, now_s = [], 0.0
    for _ in range(12):
        now_s += TEN_MINUTES_S * draw.uniform(0.7, 1.3)
        times.append(now_s)
    true_per_s = 8 / TEN_MINUTES_S
    rate = DeliveryRate(opened_s=0.0, prior_per_s=true_per_s, rows_per_delivery=8.0)
    for number, until_s in enumerate(times, start=1):
        rate = rate.delivered(until_s, 8)
        for now_s in (until_s, until_s + 0.5 * TEN_MINUTES_S, until_s + 1.3 * TEN_MINUTES_S):
            found = rate.estimate(now_s)
            assert 0.55 * true_per_s < found.mean_per_s < 1.45 * true_per_s, (number, now_s)
            assert found.lower_per_s(2.0) < true_per_s < found.upper_per_s(2.0)


def test_an_offer_that_lies_is_believed_less_with_every_group() -> None:
    rate = DeliveryRate(opened_s=0.0, prior_per_s=0.8, rows_per_delivery=8.0)
    assert deliver(rate, every(100.0, 1), rows=8).rate_per_s(100.0) == pytest.approx(8 * 3 / 120, rel=0.1)
    assert deliver(rate, every(100.0, 10), rows=8).rate_per_s(1000.0) == pytest.approx(0.08, rel=0.25)


@pytest.mark.parametrize(("share", "deliveries"), [(0.0, 4.0), (1 / 3, 12.0), (0.5, 26.0)])
@pytest.mark.parametrize("seed", range(5))
def test_a_slowdown_shows_within_three_periods_of_expected_deliveries(
    share: float, deliveries: float, seed: int
) -> None:
    """A decision period in which four groups are expected shows a stop at once and a fall to a third in three; one in
    which nine are, a fall to a half. Shows: half of the fall is certain by a standard deviation."""
    draw, rate, now_s, gap_s = Random(seed), DeliveryRate(opened_s=0.0), 0.0, 10.0
    for _ in range(80):
        now_s += gap_s * draw.uniform(0.7, 1.3)
        rate = rate.delivered(now_s, 8)
    assert rate.rate_per_s(now_s) == pytest.approx(0.8, rel=0.15)
    until_s = now_s + deliveries * gap_s
    while share and (now_s := now_s + gap_s / share * draw.uniform(0.7, 1.3)) <= until_s:
        rate = rate.delivered(now_s, 8)
    assert rate.estimate(until_s).upper_per_s() < 0.8 * (1 + share) / 2 * 1.05


def test_a_pause_between_bursts_is_no_slowdown() -> None:
    """Sixteen lanes that finish together, every 160 s: silent for 16 mean gaps again and again."""
    rate = DeliveryRate(opened_s=0.0)
    for burst in range(1, 9):
        for lane in range(16):
            rate = rate.delivered(160.0 * burst + 0.01 * lane, 8)
        if burst >= 3:
            for later_s in (1.0, 80.0, 159.0):
                found = rate.estimate(160.0 * burst + later_s)
                assert found.mean_per_s == pytest.approx(0.8, rel=0.45)
                assert found.upper_per_s(2.0) > 0.8


def test_bursts_make_an_estimate_less_sure_than_as_many_regular_deliveries() -> None:
    regular = deliver(DeliveryRate(opened_s=0.0), every(10.0, 32), rows=8).estimate(320.0)
    bursts = DeliveryRate(opened_s=0.0)
    for burst in range(1, 5):
        bursts = deliver(bursts, [80.0 * burst] * 8, rows=8)
    bursty = bursts.estimate(320.0)
    assert bursty.mean_per_s == pytest.approx(regular.mean_per_s) == pytest.approx(0.8)
    assert bursty.variance > 4 * regular.variance


def test_bounds_enclose_the_mean_and_narrow_with_deliveries() -> None:
    few = deliver(DeliveryRate(opened_s=0.0), every(10.0, 4), rows=8).estimate(40.0)
    many = deliver(DeliveryRate(opened_s=0.0), every(10.0, 64), rows=8).estimate(640.0)
    for found in (few, many, stated(0.8)):
        assert found.lower_per_s(2.0) < found.lower_per_s() < found.mean_per_s < found.upper_per_s()
    assert many.upper_per_s() - many.lower_per_s() < (few.upper_per_s() - few.lower_per_s()) / 2
    assert Estimate(0.5).lower_per_s(3.0) == Estimate(0.5).upper_per_s(3.0) == 0.5
    assert Estimate().upper_per_s() == 0.0


def test_a_pool_is_surer_than_its_workers() -> None:
    one = stated(1.0)
    pool = pooled([one] * 16)
    assert pool.mean_per_s == 16.0
    assert 1 - pool.lower_per_s() / 16.0 < (1 - one.lower_per_s()) / 3


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.001, 1e4), st.integers(1, 64)), min_size=1, max_size=80),
    st.floats(0, 1e4),
    st.floats(0, 10),
)
def test_the_rate_lies_between_zero_and_the_fastest_delivery(
    gaps: list[tuple[float, int]], silence_s: float, prior_per_s: float
) -> None:
    rate, now_s = DeliveryRate(opened_s=0.0, prior_per_s=prior_per_s), 0.0
    for gap_s, rows in gaps:
        now_s += gap_s
        rate = rate.delivered(now_s, rows)
    fastest = max(prior_per_s, *(rows / gap_s for gap_s, rows in gaps))
    found = rate.estimate(now_s + silence_s)
    assert 0 < found.mean_per_s <= fastest * 1.001
    assert 0 <= found.lower_per_s(2.0) <= found.mean_per_s <= found.upper_per_s(2.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 1e3), min_size=1, max_size=70), st.floats(0, 1e4), st.floats(0, 1e4))
def test_nothing_but_silence_never_raises_a_rate(gaps: list[float], first_s: float, more_s: float) -> None:
    rate, now_s = DeliveryRate(opened_s=0.0, prior_per_s=0.5, rows_per_delivery=8.0), 0.0
    for gap_s in gaps:
        now_s += gap_s
        rate = rate.delivered(now_s, 8)
    later = rate.estimate(now_s + first_s + more_s).mean_per_s
    assert later <= rate.estimate(now_s + first_s).mean_per_s * 1.3, (
        "a change that comes to light may drop older pauses"
    )
