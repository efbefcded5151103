from __future__ import annotations

import pytest

from echo2.broadcast.relay.meter import LEAST_BYTES, RateMeter

RATE = 5e6


class Flow:
    """A line whose total is sampled."""

    def __init__(self) -> None:
        self.meter = RateMeter()
        self.now = 100.0
        self.total = 0.0

    def run(self, rate_bytes_per_s: float, seconds: float, every_s: float = 0.1) -> Flow:
        end_s = self.now + seconds
        while self.now < end_s - 1e-9:
            self.now += every_s
            self.total += rate_bytes_per_s * every_s
            self.meter.sample(int(self.total), self.now)
        return self


def test_a_steady_flow_has_its_rate() -> None:
    assert Flow().run(RATE, 3.0).meter.peak_bytes_per_s() == pytest.approx(RATE, rel=0.01)


def test_pauses_of_the_sender_do_not_lower_the_rate() -> None:
    flow = Flow()
    for _ in range(5):
        flow.run(RATE, 2.5).run(0.0, 0.4)
    assert flow.meter.peak_bytes_per_s() == pytest.approx(RATE, rel=0.01)


def test_samples_taken_late_do_not_raise_the_rate() -> None:
    flow = Flow().run(RATE, 1.0)
    flow.run(RATE, 2.4, every_s=0.8).run(RATE, 1.0)
    assert flow.meter.peak_bytes_per_s() == pytest.approx(RATE, rel=0.01)


def test_a_lucky_half_second_on_a_shared_line_is_not_its_rate() -> None:
    flow = Flow()
    for _ in range(10):
        flow.run(2 * RATE, 0.5).run(0.5 * RATE, 1.0)
    assert flow.meter.peak_bytes_per_s() < 1.3 * RATE


def test_a_short_transfer_is_judged_by_what_there_is() -> None:
    assert Flow().run(RATE, 0.8).meter.peak_bytes_per_s() == pytest.approx(RATE, rel=0.01)


def test_a_transfer_too_short_to_tell_is_not_told() -> None:
    assert Flow().run(LEAST_BYTES / 2, 1.0).meter.peak_bytes_per_s() == 0


def test_the_newest_transfer_counts() -> None:
    flow = Flow().run(9e6, 2.0).run(0.0, 5.0).run(3e6, 2.0)
    assert flow.meter.peak_bytes_per_s() == pytest.approx(3e6, rel=0.01)


def test_a_rate_is_remembered_while_nothing_flows() -> None:
    assert Flow().run(RATE, 2.0).run(0.0, 60.0).meter.peak_bytes_per_s() == pytest.approx(RATE, rel=0.01)


def test_heartbeats_between_transfers_are_no_transfer_and_do_not_join_two_into_one() -> None:
    flow = Flow().run(9e6, 2.0).run(120.0, 60.0)
    assert flow.meter.peak_bytes_per_s() == pytest.approx(9e6, rel=0.01)
    assert flow.run(3e6, 2.0).meter.peak_bytes_per_s() == pytest.approx(3e6, rel=0.01)


def test_a_burst_that_heartbeats_follow_is_too_short_to_tell() -> None:
    assert Flow().run(LEAST_BYTES / 0.1, 0.1).run(120.0, 5.0).meter.peak_bytes_per_s() == 0


def test_what_trickles_in_after_a_short_transfer_does_not_make_its_rate_a_low_one() -> None:
    flow = Flow().run(RATE, 0.8)
    for _ in range(6):
        flow.run(0.0, 0.4).run(RATE / 50, 0.1)
    assert flow.meter.peak_bytes_per_s() == pytest.approx(RATE, rel=0.01)


def test_bytes_held_back_behind_lost_packets_do_not_make_the_line_look_faster() -> None:
    meter, now, total, held_back = RateMeter(), 100.0, 0.0, 0.0
    gaps_s = (0.05, 0.17, 0.2, 0.08, 0.15, 0.2)
    for k in range(3000):  # ten milliseconds each, of which every tenth is looked at
        period, since_s = divmod(k * 0.01, 0.37)
        in_gap = since_s < gaps_s[int(period) % len(gaps_s)]
        held_back = held_back + RATE * 0.01 if in_gap else 0.0
        now, total = now + 0.01, total + RATE * 0.01
        if k % 10 == 0:
            meter.sample(int(total - held_back), now)
    assert meter.peak_bytes_per_s() == pytest.approx(RATE, rel=0.02)


def test_two_seconds_alone_on_a_line_that_was_shared_before_are_enough_to_see_its_rate() -> None:
    assert Flow().run(RATE / 2, 1.0).run(RATE, 2.1).meter.peak_bytes_per_s() == pytest.approx(RATE, rel=0.02)
