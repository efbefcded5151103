from __future__ import annotations

from echo2.broadcast.director.assignments import Assignments
from echo2.broadcast.plan.make import make_plan
from echo2.broadcast.plan.model import SEED, Node, Plan, Stream, Topology
from echo2.broadcast.plan.repair import joined, order_at, without
from echo2.broadcast.relay.frames import MAX_SOURCES, Source

MB = 1e6


def plan_of(count: int = 6, uplink_mb: float = 20.0, topology: Topology = Topology.CHAIN, up_mb: float = 10.0) -> Plan:
    nodes = [Node(f"w{k:02}", up_mb * MB, 10 * MB) for k in range(count)]
    return make_plan(topology, nodes, uplink_mb * MB, 60 * 2**20, 2**20, 0.02, 1.0)


def where(plan: Plan) -> dict[str, Source]:
    return {SEED: Source(SEED, "", 0)} | {name: Source(name, f"{name}.test", 1) for name in plan.predicted_s}


def test_parents_are_told_before_their_children_and_the_seed_first() -> None:
    plan = plan_of()
    news = dict(Assignments(b"m").update(plan, where(plan)))
    assert list(news) == [SEED, "w00", "w01", "w02", "w03", "w04", "w05"]
    assert (news[SEED].feeds, news[SEED].planned_children) == ((), 2)
    assert news["w00"].children == ("w02", "w04")
    assert news["w00"].planned_children == 1
    (feed,) = news["w05"].feeds
    assert [source.node_id for source in feed.sources] == ["w03", "w01", SEED]
    assert feed.rate_bytes_per_s == 10 * MB
    assert feed.stretches == next(stream.stretches for stream in plan.streams if stream.child == "w05")


def test_what_did_not_change_is_not_said_again() -> None:
    plan = plan_of()
    assignments = Assignments(b"m")
    assignments.update(plan, where(plan))
    assert assignments.update(plan, where(plan)) == []
    assignments.forget("w03")
    assert [name for name, _ in assignments.update(plan, where(plan))] == ["w03"]


def test_only_those_above_and_the_new_one_hear_of_a_new_tail_in_a_later_generation() -> None:
    plan = plan_of()
    assignments = Assignments(b"m")
    first = dict(assignments.update(plan, where(plan)))
    later = joined(plan, Stream("w04", "w06", order_at(plan, "w04"), 10 * MB))
    news = dict(assignments.update(later, where(later) | {"w06": Source("w06", "w06.test", 1)}))
    assert list(news) == [SEED, "w00", "w02", "w04", "w06"]
    assert all(assign.generation > first[SEED].generation for assign in news.values())
    assert news["w04"].feeds == first["w04"].feeds


def test_an_orphan_that_already_asks_its_grandparent_is_not_interrupted() -> None:
    plan = plan_of()
    assignments = Assignments(b"m")
    first = dict(assignments.update(plan, where(plan)))
    left = without(plan, "w02")
    news = dict(assignments.update(left, where(left)))
    assert "w04" not in news
    assert news["w00"].children == ("w04",)
    assert first["w04"].feeds[0].sources[1].node_id == "w00"


def test_links_to_keep_warm_name_sources_and_no_chunks_and_follow_at_once() -> None:
    plan = plan_of()
    assignments = Assignments(b"")
    news = dict(assignments.update(plan, where(plan)))
    assert all(feed.stretches == () and feed.rate_bytes_per_s == 0 for x in news.values() for feed in x.feeds)
    left = without(plan, "w02")
    assert dict(assignments.update(left, where(left)))["w04"].feeds[0].sources[0].node_id == "w00"


def test_of_two_feeds_the_peers_is_first() -> None:
    plan = plan_of(uplink_mb=40, up_mb=2)
    news = dict(Assignments(b"m").update(plan, where(plan)))
    parents = {name: [feed.sources[0].node_id for feed in x.feeds] for name, x in news.items()}
    assert parents["w00"] == [SEED, SEED]
    assert parents["w01"] == ["w00", SEED]


def test_a_long_chain_names_the_nearest_and_the_seed() -> None:
    plan = plan_of(count=MAX_SOURCES + 40, uplink_mb=10)
    news = dict(Assignments(b"m").update(plan, where(plan)))
    last = news[plan.chains[0][-1]].feeds[0].sources
    assert len(last) == MAX_SOURCES
    assert (last[0].node_id, last[-1].node_id) == (plan.chains[0][-2], SEED)


def test_everybody_named_as_a_source_knows_the_child() -> None:
    for topology in Topology:
        plan = plan_of(9, topology=topology)
        news = dict(Assignments(b"m").update(plan, where(plan)))
        for name, assign in news.items():
            assert all(name in news[source.node_id].children for feed in assign.feeds for source in feed.sources)
