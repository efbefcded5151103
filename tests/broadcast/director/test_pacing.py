from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.director.pacing import FREE_FIRST, HELD, UNDER, Pacing, paces
from echo2.broadcast.plan.make import make_plan
from echo2.broadcast.plan.model import SEED, Node, Plan, Topology

MB = 1e6
rates = st.floats(0.5, 50.0)


def plan_of(*up_and_down_mb: tuple[float, float], uplink_mb: float = 20.0) -> Plan:
    nodes = [Node(f"w{k}", up * MB, down * MB) for k, (up, down) in enumerate(up_and_down_mb)]
    return make_plan(Topology.CHAIN, nodes, uplink_mb * MB, 60 * 2**20, 2**20, 0.02, 1.0)


def test_the_first_transfers_are_free_and_later_one_in_a_while() -> None:
    pacing, held = Pacing(), []
    for _ in range(FREE_FIRST + 2 * (HELD + 1)):
        held.append(pacing.may_hold)
        pacing.count(pacing.may_hold)
    assert held == [False] * FREE_FIRST + ([True] * HELD + [False]) * 2


def test_a_transfer_that_was_free_for_other_reasons_counts_as_free() -> None:
    pacing = Pacing()
    for _ in range(FREE_FIRST + HELD - 1):
        pacing.count(pacing.may_hold)
    pacing.count(held=False)
    for _ in range(HELD):
        assert pacing.may_hold
        pacing.count(held=True)
    assert not pacing.may_hold


def test_a_stream_is_held_a_little_below_the_rate_that_was_measured() -> None:
    held = paces(plan_of(*[(10.0, 10.0)] * 4), lambda parent, child: True)
    assert list(held.values()) == [pytest.approx(UNDER * 10 * MB)] * 4


def test_streams_are_free_whose_ends_were_not_seen_at_their_best() -> None:
    plan = plan_of(*[(10.0, 10.0)] * 4)
    held = paces(plan, lambda parent, child: parent == SEED)
    assert {stream.parent for stream in held} == {SEED}


def test_who_was_measured_far_too_slow_can_still_show_what_others_can() -> None:
    plan = plan_of((10.0, 10.0), (10.0, 10.0), (10.0, 10.0), (10.0, 2.0))
    (slow,) = (pace for stream, pace in paces(plan, lambda parent, child: True).items() if stream.child == "w3")
    assert slow == pytest.approx(UNDER * 10 * MB)


@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=12), rates)
def test_nobody_is_held_below_what_the_plan_counts_on(fleet: list[tuple[float, float]], uplink_mb: float) -> None:
    plan = plan_of(*fleet, uplink_mb=uplink_mb)
    for stream, pace in paces(plan, lambda parent, child: True).items():
        assert pace >= UNDER * stream.rate_bytes_per_s * (1 - 1e-9)
