from __future__ import annotations

import pytest
from fluid_fleet import BASE, MB, NEXT, facts

from echo2.broadcast.director.transfer import SLOW_S, STANDSTILL_S, ObjectFacts, Transfer
from echo2.broadcast.plan.make import make_plan
from echo2.broadcast.plan.model import SEED, Node, Topology
from echo2.broadcast.plan.repair import without
from echo2.broadcast.relay.frames import Report, Source

NAMES = [f"w{k}" for k in range(8)]
DELTA, ANCHOR = facts("d"), facts("a", base_root="")


@pytest.mark.parametrize(
    ("published", "report", "newest", "waits"),
    [
        (DELTA, Report(held=(BASE,)), True, True),
        (DELTA, Report(held=(BASE,)), False, False),
        (DELTA, Report(), True, False),
        (DELTA, Report(held=(BASE, NEXT)), True, False),
        (DELTA, Report(held=(BASE,), complete=(DELTA.root,)), True, False),
        (DELTA, Report(needs=(DELTA.root,)), False, True),
        (DELTA, Report(progress={DELTA.root: 3}), False, True),
        (ANCHOR, Report(held=(BASE,)), False, False),
        (ANCHOR, Report(needs=(ANCHOR.root,)), False, True),
    ],
)
def test_who_has_to_get_the_object(published: ObjectFacts, report: Report, newest: bool, waits: bool) -> None:
    transfer = Transfer(published)
    transfer.report("w0", report, newest, 1.0)
    assert transfer.waiting == ({"w0": 1.0} if waits else {})


def test_who_waits_has_waited_since_it_began_to_and_no_longer_than_it_needs_to() -> None:
    transfer = Transfer(ANCHOR)
    transfer.report("w0", Report(needs=(ANCHOR.root,)), False, 1.0)
    transfer.report("w0", Report(needs=(ANCHOR.root,), sent_bytes=1), False, 2.0)
    assert transfer.waiting == {"w0": 1.0}
    transfer.report("w0", Report(), False, 3.0)
    assert transfer.waiting == {}


def planned(topology: Topology = Topology.CHAIN, uplink_mb: float = 20.0) -> Transfer:
    """Two chains of four: w0 w2 w4 w6 and w1 w3 w5 w7."""
    transfer = Transfer(DELTA)
    nodes = [Node(name, 10 * MB, 10 * MB) for name in NAMES]
    transfer.plan = make_plan(topology, nodes, uplink_mb * MB, DELTA.size_bytes, DELTA.chunk_bytes, 0.02, 1.1)
    return transfer


def parents_in(transfer: Transfer) -> dict[str, str]:
    plan = transfer.present(NAMES)
    assert plan is not None
    return {stream.child: stream.parent for stream in plan.streams}


def progress(**counts: int) -> dict[str, Report]:
    return {name: Report(progress={DELTA.root: counts.get(name, 100)}) for name in NAMES}


def slow_after(transfer: Transfer, reports: dict[str, Report], seconds: float = SLOW_S) -> list[str]:
    transfer.slow(reports, 10.0)
    return transfer.slow(reports, 10.0 + seconds)


def test_a_node_far_behind_with_others_waiting_is_slow_after_a_while() -> None:
    reports = progress(w2=30, w4=29, w6=28)
    assert slow_after(planned(), reports) == ["w2"]
    assert slow_after(planned(), reports, SLOW_S - 0.1) == []


def test_a_head_is_compared_with_the_other_chain() -> None:
    assert slow_after(planned(), progress(w0=30, w2=29, w4=28, w6=27)) == ["w0"]


def test_who_catches_up_in_between_is_not_slow() -> None:
    transfer = planned()
    transfer.slow(progress(w2=30, w4=29, w6=28), 10.0)
    transfer.slow(progress(w2=60, w4=59, w6=58), 12.0)
    assert transfer.slow(progress(w2=30, w4=29, w6=28), 14.0) == []


def test_a_slow_tail_and_one_whose_children_are_done_hold_nobody_up() -> None:
    assert slow_after(planned(), progress(w6=10)) == []
    transfer = planned()
    done = Report(complete=(DELTA.root,))
    for name in ("w4", "w6"):
        transfer.report(name, done, True, 0.0)
    assert slow_after(transfer, progress(**dict.fromkeys(NAMES, 300) | {"w2": 30}) | {"w4": done, "w6": done}) == []


@pytest.mark.parametrize("topology", [Topology.STAR, Topology.RING])
def test_in_a_star_nobody_waits_for_another_and_around_a_ring_nobody_is_to_blame(topology: Topology) -> None:
    assert slow_after(planned(topology), progress(w2=1)) == []


def test_one_line_alone_is_compared_with_those_in_front() -> None:
    assert slow_after(planned(uplink_mb=10), progress(w3=40, w4=39, w5=38, w6=37, w7=36)) == ["w3"]


def test_a_node_that_left_is_not_planned_for_and_finds_its_place_again() -> None:
    transfer = planned()
    left = transfer.present([name for name in NAMES if name != "w2"])
    assert left is not None
    assert {stream.child: stream.parent for stream in left.streams}["w4"] == "w0"
    assert transfer.present(NAMES) == transfer.plan
    assert Transfer(DELTA).present(NAMES) is None


def test_done_is_who_had_it_whole_even_when_it_let_go_of_it() -> None:
    transfer = planned()
    transfer.report("w0", Report(complete=(DELTA.root,)), True, 0.0)
    transfer.report("w0", Report(), True, 1.0)
    transfer.report("w1", Report(held=(NEXT,)), True, 1.0)
    assert transfer.unfinished(NAMES) == set(NAMES) - {"w0", "w1"}
    transfer.report("w0", Report(needs=(DELTA.root,)), True, 2.0)
    assert "w0" in transfer.unfinished(NAMES)
    assert transfer.stale


def test_who_lost_what_it_had_and_asks_again_is_told_its_part_again() -> None:
    transfer = planned()
    assert transfer.plan is not None
    where = {name: Source(name, f"{name}.test", 1) for name in (SEED, *NAMES)}
    transfer.assignments.update(transfer.plan, where)
    asks = Report(needs=(DELTA.root,))
    transfer.report("w3", asks, True, 1.0)
    assert not transfer.stale, "its file is only being opened"
    transfer.report("w3", Report(needs=(DELTA.root,), progress={DELTA.root: 7}), True, 2.0)
    transfer.report("w3", asks, True, 3.0)
    assert transfer.stale
    assert [name for name, _ in transfer.assignments.update(transfer.plan, where)] == ["w3"]
    transfer.stale = False
    transfer.report("w3", asks, True, 3.5)
    assert not transfer.stale, "once is enough"


def test_who_came_late_is_measured_by_what_it_gained_since() -> None:
    transfer = planned()
    transfer.slow(progress(), 0.0)
    transfer.tell_again("w2")
    assert slow_after(transfer, progress(w2=0)) == [], "the others had theirs before"
    reports = progress(**dict.fromkeys(NAMES, 200) | {"w2": 40})
    assert slow_after(transfer, reports) == ["w2"], "since then they gained a hundred and it forty"


def test_who_gave_the_object_up_for_another_way_is_waited_for_no_more_and_feeds_nobody() -> None:
    transfer = planned()
    transfer.report("w2", Report(held=(BASE,), progress={DELTA.root: 7}), True, 1.0)
    transfer.stale = False
    transfer.report("w2", Report(held=(BASE,)), True, 2.0)
    assert transfer.stale
    assert transfer.plan is not None
    assert {stream.child: stream.parent for stream in transfer.plan.streams}["w4"] == "w0"
    assert "w2" not in transfer.unfinished(NAMES)
    assert transfer.waiting == {}, "although it holds the base"
    transfer.report("w2", Report(needs=(DELTA.root,)), True, 3.0)
    assert transfer.waiting == {"w2": 3.0}, "it asks again"


def test_who_let_go_of_the_object_is_neither_asked_for_it_nor_sent_it_again() -> None:
    transfer = planned()
    whole = Report(complete=(DELTA.root,))
    transfer.report("w2", whole, True, 1.0)
    assert parents_in(transfer)["w4"] == "w2"
    transfer.report("w2", Report(held=(BASE,)), True, 2.0)
    transfer.tell_again("w2")  # it connects again
    assert "w2" not in parents_in(transfer)
    assert parents_in(transfer)["w4"] == "w0"


def test_who_comes_back_with_the_object_feeds_others_again() -> None:
    transfer = planned()
    whole = Report(complete=(DELTA.root,))
    transfer.report("w2", whole, True, 1.0)
    transfer.tell_again("w2")
    transfer.stale = False
    transfer.report("w2", whole, True, 2.0)
    assert transfer.stale
    assert parents_in(transfer)["w4"] == "w2"


def test_a_transfer_in_which_nothing_moves_is_not_under_way() -> None:
    """A node without room asks for the object and gets none of it."""
    transfer = planned()
    assert transfer.plan is not None
    transfer.begin(transfer.plan, 5.0)
    assert transfer.is_under_way(NAMES, 5.0 + STANDSTILL_S - 0.1)
    assert not transfer.is_under_way(NAMES, 5.0 + STANDSTILL_S)
    transfer.report("w0", Report(progress={DELTA.root: 1}), True, 40.0)
    assert transfer.is_under_way(NAMES, 41.0)
    assert not transfer.is_under_way([], 41.0)


def test_h05_time_in_which_the_seed_stood_still_is_no_time_in_which_others_were_held_up() -> None:
    transfer, reports = planned(), progress(w2=30, w4=29, w6=28)
    transfer.slow(reports, 10.0)
    transfer.stood_still(3.0, 13.5)
    assert transfer.slow(reports, 13.5) == []
    assert transfer.slow(reports, 13.0 + SLOW_S) == ["w2"]


def test_the_nodes_of_a_plan_are_gathered_once() -> None:
    transfer = planned()
    assert transfer.planned == set(NAMES)
    assert transfer.planned is transfer.planned
    assert transfer.plan is not None
    transfer.plan = without(transfer.plan, "w3")
    assert transfer.planned == set(NAMES) - {"w3"}


def test_a_newcomer_is_no_reason_to_look_through_plans_that_it_is_not_in() -> None:
    transfer = planned()
    transfer.tell_again("stranger")
    assert not transfer.stale
    transfer.tell_again("w3")
    assert transfer.stale
