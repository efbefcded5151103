"""Leases end once, by the coordinator's clock alone (D08, H05, H12)."""

from __future__ import annotations

import pytest

from echo2.coordinator.fleet import FIRST_OVERDUE_S, Fleet, RunningLease


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(dead_after_s=30.0, lease_max_s=100.0, usd_per_h=1.0)
    fleet.seen("w1", "one", 0.0)
    fleet.seen("w2", "two", 0.0)
    return fleet


def start(fleet: Fleet, lease_id: str, worker: str, now: float, group: int = 0) -> None:
    fleet.start(RunningLease(lease_id, worker, group, 1, now))


def test_a_worker_that_is_heard_from_keeps_its_leases(fleet: Fleet) -> None:
    start(fleet, "a", "w1", 0.0)
    fleet.seen("w1", "one", 29.0)
    silent, lost = fleet.lost(31.0)
    assert [worker.worker_id for worker in silent] == ["w2"]
    assert lost == []


def test_a_silent_worker_loses_its_leases_and_comes_back_by_being_heard(fleet: Fleet) -> None:
    start(fleet, "a", "w1", 0.0)
    fleet.seen("w2", "two", 31.0)
    silent, lost = fleet.lost(31.0)
    assert ([w.worker_id for w in silent], [x.lease_id for x in lost]) == (["w1"], ["a"])
    fleet.seen("w1", "one", 40.0)
    assert len(fleet.active()) == 2


def test_a_worker_that_is_silent_for_long_again_and_again_does_not_flap(fleet: Fleet) -> None:
    """It generates for 50 s without a word where 30 s count as death: taken for dead once, not every time (H05)."""
    deaths = []
    for now in range(1, 601):
        if now % 51 == 0:
            fleet.seen("w1", "one", float(now))
        deaths += [(now, w.worker_id) for w in fleet.lost(float(now))[0]]
    assert deaths == [(31, "w1"), (31, "w2")]


def test_a_worker_that_started_anew_is_judged_as_anybody(fleet: Fleet) -> None:
    fleet.lost(31.0)
    fleet.seen("w1", "one", 40.0)
    fleet.restarted("w1")
    assert [w.worker_id for w in fleet.lost(71.0)[0]] == ["w1"]


def test_time_in_which_a_worker_was_gone_says_nothing_of_its_rate(fleet: Fleet) -> None:
    start(fleet, "a", "w1", 0.0)
    fleet.delivered("w1", 8, 4.0)
    fleet.seen("w1", "one", 4.0)
    fleet.lost(1000.0)
    fleet.seen("w1", "one", 1000.0)
    assert fleet.pool_rate_per_s(1000.0) == 2.0


@pytest.mark.parametrize(("blocked_s", "gone"), [(28.0, []), (30.0, ["w1"])])
def test_a_call_may_block_a_worker_for_the_silence_less_one_beat(
    blocked_s: float, gone: list[str], fleet: Fleet
) -> None:
    """Field report H05. Beats are two seconds apart, and the call begins in the very moment of one."""
    due_s = 12.0
    fleet.seen("w1", "one", due_s - 2.0)
    heard_s = due_s + blocked_s
    fleet.seen("w2", "two", heard_s)
    assert [worker.worker_id for worker in fleet.lost(heard_s)[0]] == gone


def test_heartbeats_do_not_keep_a_lease_beyond_its_longest_life(fleet: Fleet) -> None:
    start(fleet, "a", "w1", 0.0)
    fleet.seen("w1", "one", 101.0)
    fleet.seen("w2", "two", 101.0)
    assert [x.lease_id for x in fleet.lost(101.0)[1]] == ["a"]


def test_a_lease_is_overdue_after_three_medians_and_only_once(fleet: Fleet) -> None:
    for number in range(3):
        start(fleet, f"done{number}", "w1", float(number))
        fleet.end(f"done{number}", float(number) + 2.0, 1)
    start(fleet, "slow", "w1", 10.0)
    assert fleet.newly_overdue(15.9) == []
    assert [x.lease_id for x in fleet.newly_overdue(16.1)] == ["slow"]
    assert fleet.newly_overdue(99.0) == []


def test_before_any_lease_ended_a_stated_time_counts(fleet: Fleet) -> None:
    start(fleet, "first", "w1", 0.0)
    assert fleet.newly_overdue(FIRST_OVERDUE_S) == []
    assert len(fleet.newly_overdue(FIRST_OVERDUE_S + 0.1)) == 1


def test_the_pool_rate_counts_living_workers_and_not_the_time_the_gate_held_them(fleet: Fleet) -> None:
    start(fleet, "a", "w1", 0.0)
    fleet.delivered("w1", 8, 4.0)
    assert fleet.pool_rate_per_s(4.0) == 2.0
    fleet.workers["w1"].hold(1, 4.0)
    assert fleet.pool_rate_per_s(6.0) == 2.0
    fleet.workers["w1"].hold(-1, 8.0)
    assert fleet.pool_rate_per_s(8.0) == 2.0
    assert fleet.pool_rate_per_s(12.0) == 1.0
    fleet.retire("w1", left=True)
    assert fleet.pool_rate_per_s(8.0) == 0.0


def test_a_pause_of_the_coordinator_is_not_a_workers_silence(fleet: Fleet) -> None:
    """H05"""
    start(fleet, "a", "w1", 0.0)
    fleet.seen("w2", "two", 299.0)
    fleet.excuse(290.0, 300.0)
    assert fleet.lost(300.0) == ([], [x for x in fleet.leases.values() if x.granted_s < 200.0])
    assert fleet.workers["w2"].last_seen_s == 300.0, "nobody is heard from in the future"
    assert [w.worker_id for w in fleet.lost(321.0)[0]] == ["w1"]
