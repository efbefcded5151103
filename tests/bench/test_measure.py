from __future__ import annotations

import pytest
from bench.wan.measure import Transfer, limits, lower_bound_s, share_count, summarise, time_of_share
from bench.wan.network import Host, Window

MBPS = 1e6 / 8


def a_transfer(arrived_s: dict[int, float], *, emulator: float = 0.3, machine: float = 0.5) -> Transfer:
    window = Window(10.0, emulator, 0.001, 0, (2000, 1000, 0), (0, 0, 0))
    return Transfer(arrived_s, window, {0: 1.0, 1: 2.0, 2: 4.0}, machine)


def test_the_bound_is_a_workers_line_when_uplink_and_peers_suffice() -> None:
    workers = [Host(50 * MBPS, 50 * MBPS)] * 16
    assert lower_bound_s(128 << 20, Host(400 * MBPS, 400 * MBPS), workers, 0.9) == pytest.approx(21.475, abs=0.001)


def test_the_bound_is_the_learners_uplink_when_that_is_the_narrowest() -> None:
    assert lower_bound_s(1000, Host(10, 10), [Host(50, 50)] * 4, 1.0) == 100.0


def test_the_bound_counts_all_uplinks_together_when_workers_upload_slowly() -> None:
    # 8 workers, u = 20, d = 100, B_0 = 400: 8 x 64 MiB over 400 + 160 Mbit/s = 7.67 s (broadcast notes: 7.6 s)
    workers = [Host(20 * MBPS, 100 * MBPS)] * 8
    assert lower_bound_s(64 << 20, Host(400 * MBPS, 400 * MBPS), workers, 1.0) == pytest.approx(7.67, abs=0.01)


def test_a_share_need_not_wait_for_the_slowest_lines() -> None:
    workers = [Host(10, 10)] + [Host(100, 100)] * 9
    assert lower_bound_s(1000, Host(1e6, 1e6), workers, 0.9) == 10.0
    assert lower_bound_s(1000, Host(1e6, 1e6), workers, 1.0) == 100.0


@pytest.mark.parametrize(("workers", "count"), [(1, 1), (4, 4), (10, 9), (16, 15), (32, 29)])
def test_nine_tenths_of_the_workers_are_rounded_up(workers: int, count: int) -> None:
    assert share_count(workers, 0.9) == count


def test_the_time_of_a_share_is_when_the_last_of_it_arrived() -> None:
    arrived_s = {host: float(host) for host in range(1, 11)}
    assert time_of_share(arrived_s, 0.9) == 9.0
    assert time_of_share(arrived_s, 1.0) == 10.0


def test_a_run_in_which_the_emulator_or_the_machine_was_the_limit_says_so() -> None:
    assert limits(a_transfer({1: 1.0})) == []
    assert limits(a_transfer({1: 1.0}, emulator=0.81)) == ["emulator"]
    assert limits(a_transfer({1: 1.0}, machine=0.97)) == ["machine"]


def test_repeats_are_summarised_by_medians_and_one_doubtful_run_is_enough_to_doubt() -> None:
    transfers = [
        a_transfer({1: 4.0, 2: 5.0}),
        a_transfer({1: 4.0, 2: 9.0}),
        a_transfer({1: 4.0, 2: 6.0}, emulator=0.9),
    ]
    summary = summarise(transfers, 1000, 0.9, (3.0, 3.0))
    assert (summary["all_s"], summary["all_ratio"], summary["inconclusive"]) == (6.0, 2.0, True)
    assert summary["runs"][0]["seed_sent_objects"] == 2.0
    assert summary["runs"][0]["cpu_s_per_gb_delivered"] == pytest.approx(7.0 / 2e-6)
