from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.broadcast.plan.make import make_plan
from echo2.broadcast.plan.model import SEED, Node, Plan, Stream, Stretch, Topology
from echo2.broadcast.plan.repair import Kin, joined, order_at, without

MB = 10**6


def plan_of(topology: Topology, count: int, uplink: float = 20.0, up: float = 10.0, down: float = 10.0) -> Plan:
    nodes = [Node(f"w{k:02}", up * MB, down * MB) for k in range(count)]
    return make_plan(topology, nodes, uplink * MB, 60 * MB, 2**20, 0.02, 1.0)


def test_the_way_up_ends_at_the_seed() -> None:
    plan = plan_of(Topology.CHAIN, 6)
    assert plan.chains == (("w00", "w02", "w04"), ("w01", "w03", "w05"))
    assert Kin(plan).ancestors("w04") == ("w02", "w00", SEED)
    assert Kin(plan).ancestors("w00") == (SEED,)
    assert Kin(plan).descendants("w00") == ("w02", "w04")
    assert set(Kin(plan).descendants(SEED)) == {f"w{k:02}" for k in range(6)}


def test_around_a_ring_everybody_is_above_and_below_everybody() -> None:
    plan = plan_of(Topology.RING, 4)
    others = {"w01", "w02", "w03"}
    assert set(Kin(plan).ancestors("w00")) >= others | {SEED}
    assert set(Kin(plan).descendants("w00")) == others
    closing = next(stream for stream in plan.streams if stream.child == "w00" and stream.parent != SEED)
    assert Kin(plan).sources(closing) == ("w03", "w01", "w02", SEED)


def test_a_stream_from_the_seed_has_no_other_source() -> None:
    plan = plan_of(Topology.CHAIN, 8, uplink=40, up=1)
    direct = next(stream for stream in plan.streams if stream.parent == SEED)
    assert Kin(plan).sources(direct) == (SEED,)


def test_a_childs_sources_name_everybody_further_up_and_those_name_the_child() -> None:
    for topology in Topology:
        plan = plan_of(topology, 7)
        for stream in plan.streams:
            assert all(stream.child in Kin(plan).descendants(source) for source in Kin(plan).sources(stream))


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(Topology), st.integers(2, 10), st.sampled_from([1.0, 10.0]), st.data())
def test_whoever_leaves_the_others_still_get_every_chunk_once(
    topology: Topology, count: int, up: float, data: st.DataObject
) -> None:
    plan = plan_of(topology, count, up=up)
    for _ in range(data.draw(st.integers(1, count - 1))):
        plan = without(plan, data.draw(st.sampled_from(sorted(plan.predicted_s))))
    for name in plan.predicted_s:
        streams = [stream for stream in plan.streams if stream.child == name]
        numbers = [x for stream in streams for stretch in stream.stretches for x in stretch.numbers()]
        assert sorted(numbers) == list(range(math.ceil(plan.size_bytes / plan.chunk_bytes)))
        assert {stream.parent for stream in streams} <= {*plan.predicted_s, SEED}
    if topology is Topology.RING:
        assert sum(x.count for s in plan.streams if s.parent == SEED for x in s.stretches) == 58


def test_an_orphan_gets_its_grandparent() -> None:
    plan = without(plan_of(Topology.CHAIN, 6), "w02")
    assert Kin(plan).ancestors("w04") == ("w00", SEED)
    assert plan.chains[0] == ("w00", "w04")


@pytest.mark.parametrize("step", [1, -1])
def test_a_part_of_a_descending_stretch_descends(step: int) -> None:
    down = Stretch(9, 10, -1) if step < 0 else Stretch(0, 10)
    streams = (
        Stream(SEED, "a", (Stretch(0, 4),), 1.0),
        Stream("x", "a", (Stretch(9, 6, -1),), 1.0),
        Stream("a", "b", (down,), 1.0),
    )
    plan = without(Plan(Topology.CHAIN, 10, 1, streams, {"a": 1.0, "b": 1.0}, 1.0, 1.0, 1.0, 1.0), "a")
    parts = {stream.parent: [x for s in stream.stretches for x in s.numbers()] for stream in plan.streams}
    assert parts == {SEED: [0, 1, 2, 3][::step], "x": [4, 5, 6, 7, 8, 9][::step]}


def test_a_late_comer_gets_chunks_in_the_order_in_which_its_parent_got_them() -> None:
    plan = plan_of(Topology.CHAIN, 4)
    late = joined(plan, Stream("w03", "w04", order_at(plan, "w03"), 10.0 * MB))
    assert Kin(late).ancestors("w04") == ("w03", "w01", SEED)
    assert late.streams[-1].stretches == plan.streams[-1].stretches
