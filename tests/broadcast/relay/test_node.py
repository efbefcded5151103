"""Relay cores in virtual time: what arrives, when, and whom a node leaves."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from virtual_relays import CHUNK_BYTES, Relays, object_manifest

from echo2.broadcast.director.assignments import Assignments
from echo2.broadcast.plan.make import make_plan
from echo2.broadcast.plan.model import SEED, Stretch, Topology
from echo2.broadcast.plan.model import Node as PlannedNode
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.intake import SILENT_S
from echo2.broadcast.relay.links import Hangup
from echo2.broadcast.relay.node import Node
from echo2.broadcast.relay.receiver import KEPT_OBJECTS

CHAIN = ("a", "b", "c", "d")
COUNT = 200
MANIFEST = object_manifest(COUNT)
ROOT = MANIFEST.object_root


def joined(names: tuple[str, ...] = CHAIN, **options: float) -> Relays:
    relays = Relays(names, **options)  # type: ignore[arg-type]
    relays.run(2.0)
    return relays


def undisturbed_s() -> float:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    return relays.run_until_whole(ROOT, CHAIN, 30.0)


def chunk_s(relays: Relays) -> float:
    return CHUNK_BYTES / relays.rate


def test_an_undisturbed_chain_takes_the_time_of_one_hop_plus_one_chunk_per_further_hop() -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    took_s = relays.run_until_whole(ROOT, CHAIN, 30.0)
    single_s = COUNT * chunk_s(relays)
    per_hop_s = chunk_s(relays) + relays.latency_s
    connecting_s = 0.4
    assert took_s <= single_s + len(CHAIN) * per_hop_s + connecting_s


def test_every_chunk_travels_each_link_exactly_once_and_in_order() -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run_until_whole(ROOT, CHAIN, 30.0)
    relays.run(2.0)
    assert relays.sent == {edge: list(range(COUNT)) for edge in zip((SEED, *CHAIN), CHAIN, strict=False)}


def test_the_seed_sends_the_object_once_to_a_single_chain() -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run_until_whole(ROOT, CHAIN, 30.0)
    assert relays.nodes[SEED].report().sent_bytes == MANIFEST.object_size
    assert relays.nodes["d"].report().sent_bytes == 0
    assert [relays.nodes[name].report().received_bytes for name in CHAIN] == [MANIFEST.object_size] * 4


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_killing_a_relay_costs_the_others_less_than_a_second(victim: str) -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run(0.8)
    relays.kill(victim)
    others = [name for name in CHAIN if name != victim]
    assert relays.run_until_whole(ROOT, others, 30.0) + 0.8 <= undisturbed_s() + 1.0
    assert relays.events("relay_reparented")[0]["left"] == victim


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_freezing_a_relay_costs_the_others_less_than_two_and_a_half_seconds(victim: str) -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run(0.8)
    relays.frozen.add(victim)
    others = [name for name in CHAIN if name != victim]
    assert relays.run_until_whole(ROOT, others, 30.0) + 0.8 <= undisturbed_s() + 2.5


def test_a_wrong_chunk_is_never_kept_and_its_sender_is_left_at_once_and_accused() -> None:
    relays = joined()
    relays.corrupt.add("b")
    relays.publish_chain(MANIFEST, CHAIN)
    took_s = relays.run_until_whole(ROOT, CHAIN, 30.0)
    assert took_s <= undisturbed_s() + 1.0
    assert [event["peer"] for event in relays.events("relay_wrong_chunk")] == ["b"]
    relays.run(1.0)
    assert len(relays.sent["b", "c"]) <= 1 + relays.latency_s * 4 / chunk_s(relays)
    assert relays.sent["c", "d"] == list(range(COUNT))


def test_good_chunks_are_not_fetched_again_after_a_parent_died() -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run(1.2)
    relays.kill("b")
    relays.run_until_whole(ROOT, ["a", "c", "d"], 30.0)
    twice = set(relays.sent["b", "c"]) & set(relays.sent["a", "c"])
    in_flight = 2 + 2 * relays.latency_s / chunk_s(relays)
    assert len(twice) <= in_flight


def test_a_parent_that_promises_chunks_and_sends_none_is_left() -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run(0.5)
    relays.stop_chunks("b")
    took_s = relays.run_until_whole(ROOT, CHAIN, 30.0)
    assert took_s <= undisturbed_s() + 5.0


def test_a_parent_slowed_to_a_tenth_is_left() -> None:
    manifest = object_manifest(1500)
    relays = joined()
    relays.publish_chain(manifest, CHAIN)
    relays.run(1.0)
    relays.slow["b"] = 0.1
    took_s = relays.run_until_whole(manifest.object_root, CHAIN, 120.0)
    assert took_s <= 1.2 * 1500 * chunk_s(relays) + 5.0


def test_a_child_is_not_served_by_a_parent_that_no_plan_gave_to_it() -> None:
    relays = joined(("a", "x"))
    relays.publish_chain(MANIFEST, ("a",))
    relays.run_until_whole(ROOT, ["a"], 30.0)
    everything = (Stretch(0, COUNT),)
    stranger = f.Feed((relays.source("a"), relays.source(SEED)), everything, 1e6, True)
    relays.assign("x", f.Assign(1, b"signed", (stranger,), (), 0), MANIFEST)
    relays.run_until_whole(ROOT, ["x"], 30.0)
    assert ("a", "x") not in relays.sent
    assert "refused" in str(relays.events("relay_reparented")[0]["why"])


def test_two_feeds_share_an_object_and_meet_without_much_repetition() -> None:
    relays = joined(("a", "b"))
    relays.nodes[SEED].publish(MANIFEST, relays.now)
    up = f.Feed((relays.source("a"), relays.source(SEED)), (Stretch(0, COUNT // 2),), 1e6, True)
    down = f.Feed((relays.source(SEED),), (Stretch(COUNT - 1, COUNT // 2, -1),), 1e6, True)
    head = f.Feed((relays.source(SEED),), (Stretch(0, COUNT),), 1e6, True)
    relays.assign(SEED, f.Assign(1, b"signed", (), ("a", "b"), 2), MANIFEST)
    relays.assign("a", f.Assign(1, b"signed", (head,), ("b",), 1), MANIFEST)
    relays.assign("b", f.Assign(1, b"signed", (up, down), (), 0), MANIFEST)
    took_s = relays.run_until_whole(ROOT, ["a", "b"], 30.0)
    got = relays.sent["a", "b"] + relays.sent[SEED, "b"]
    assert set(got) == set(range(COUNT))
    assert len(got) <= COUNT + 8
    assert relays.sent[SEED, "b"][0] == COUNT - 1
    assert took_s <= COUNT * chunk_s(relays) + 1.0


def paced(relays: Relays, name: str, *parents: str, rate: float) -> None:
    sources = tuple(relays.source(parent) for parent in parents)
    feed = f.Feed(sources, (Stretch(0, COUNT),), 1e6, True, rate)
    relays.assign(name, f.Assign(1, b"signed", (feed,), (), 0), MANIFEST)


def test_a_parent_is_held_at_the_pace_of_the_plan_while_it_sends() -> None:
    relays = joined(("a",))
    relays.nodes[SEED].publish(MANIFEST, relays.now)
    relays.assign(SEED, f.Assign(1, b"signed", (), ("a",), 1), MANIFEST)
    paced(relays, "a", SEED, rate=2e6)
    relays.run_until_whole(ROOT, ["a"], 30.0)
    relays.run(1.0)
    assert relays.paces == [(SEED, "a", 2e6), (SEED, "a", 0.0)]


def test_connections_of_one_feed_divide_its_pace() -> None:
    relays = joined(("a",), lanes=4)
    relays.nodes[SEED].publish(MANIFEST, relays.now)
    relays.assign(SEED, f.Assign(1, b"signed", (), ("a",), 1), MANIFEST)
    paced(relays, "a", SEED, rate=2e6)
    relays.run_until_whole(ROOT, ["a"], 30.0)
    relays.run(1.0)
    assert {pace for *_, pace in relays.paces} == {5e5, 0.0}


def test_who_stands_in_for_a_parent_that_failed_is_not_held() -> None:
    relays = joined(("a", "b"))
    relays.publish_chain(MANIFEST, ("a",))
    relays.assign(SEED, f.Assign(2, b"signed", (), ("a", "b"), 1), MANIFEST)
    relays.unreachable.add("a")
    paced(relays, "b", "a", SEED, rate=2e6)
    relays.run_until_whole(ROOT, ["b"], 30.0)
    assert (SEED, "b") in relays.sent
    assert relays.paces == []


def test_a_link_that_carries_something_free_is_free() -> None:
    newer = object_manifest(COUNT, version=4)
    relays = joined(("a",))
    relays.publish_chain(MANIFEST, ("a",))
    relays.nodes[SEED].publish(newer, relays.now)
    feed = f.Feed((relays.source(SEED),), (Stretch(0, COUNT),), 1e6, True, 2e6)
    relays.assign(SEED, f.Assign(1, b"signed", (), ("a",), 1), newer)
    relays.assign("a", f.Assign(1, b"signed", (feed,), (), 0), newer)
    relays.run(0.3)
    assert relays.paces == []
    relays.run_until_whole(newer.object_root, ["a"], 30.0)
    assert (SEED, "a", 2e6) in relays.paces


def test_an_older_version_goes_before_a_newer_one_on_the_same_link() -> None:
    newer = object_manifest(COUNT, version=4)
    relays = joined(("a",))
    relays.publish_chain(MANIFEST, ("a",))
    relays.run(0.3)
    relays.publish_chain(newer, ("a",))
    relays.run_until_whole(newer.object_root, ["a"], 30.0)
    assert relays.whole["a", ROOT] < relays.whole["a", newer.object_root]
    assert relays.sent[SEED, "a"] == [*range(COUNT), *range(COUNT)]


def test_a_needed_object_that_nobody_sends_is_reported_to_the_program() -> None:
    relays = joined(("a",))
    relays.nodes["a"].bring(MANIFEST, relays.now)
    relays.act("a")
    relays.run(25.0)
    assert relays.stuck() == ["a"]


def test_what_the_program_repaired_is_kept_when_it_asks_again() -> None:
    relays = joined(("a",))
    relays.nodes["a"].bring(MANIFEST, relays.now)
    relays.act("a")
    relays.run(25.0)
    relays.disk["a", ROOT] = bytearray(b"\1" * (COUNT - 3) + bytes(3))
    relays.nodes["a"].bring(MANIFEST, relays.now)
    relays.act("a")
    relays.publish_chain(MANIFEST, ("a",))
    relays.run_until_whole(ROOT, ["a"], 5.0)
    assert relays.sent[SEED, "a"] == [COUNT - 3, COUNT - 2, COUNT - 1]


def test_a_seed_that_starts_again_is_dialled_again_and_transfers_go_on() -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run(1.0)
    relays.kill(SEED)
    relays.run(3.0)
    relays.revive_seed()
    relays.publish_chain(MANIFEST, CHAIN)
    assert relays.run_until_whole(ROOT, CHAIN, 30.0) <= undisturbed_s() + 12.0


def test_several_connections_per_feed_carry_every_chunk_once() -> None:
    relays = joined(lanes=4)
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run_until_whole(ROOT, CHAIN, 30.0)
    assert sorted(relays.sent["b", "c"]) == list(range(COUNT))


def test_a_node_that_stood_still_does_not_blame_its_peers() -> None:
    relays = joined()
    relays.frozen.add("b")
    relays.run(1.0)
    relays.frozen.discard("b")
    before = len(relays.words)
    relays.run(2.0)
    assert not [word for who, word in relays.words[before:] if who == "b" and type(word).__name__ == "Event"]


def test_a_revived_node_joins_the_transfer_again() -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run(0.5)
    relays.frozen.add("c")
    relays.run(6.0)
    relays.frozen.discard("c")
    relays.run_until_whole(ROOT, CHAIN, 30.0)


def test_reports_tell_what_is_had_and_how_fast_it_came() -> None:
    relays = joined()
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run_until_whole(ROOT, CHAIN, 30.0)
    relays.run(1.0)
    edges = relays.nodes["c"].report().edges
    assert edges["b"] == pytest.approx(relays.rate, rel=0.15)


def test_h11_who_cannot_be_dialled_is_told_to_the_seed_and_forgotten_once_it_answers() -> None:
    relays = joined(("a", "b"))
    relays.unreachable.add("a")
    relays.publish_chain(MANIFEST, ("a", "b"))
    relays.run_until_whole(ROOT, ["a", "b"], 30.0)
    assert relays.nodes["b"].report().unreachable == ("a",)
    relays.unreachable.discard("a")
    relays.nodes["b"]._links.dial(relays.source("a"), 0)
    relays.act("b")
    relays.run(1.0)
    assert relays.nodes["b"].report().unreachable == ()


def test_h09_nodes_that_lost_the_seed_together_dial_it_at_different_times_and_ever_less_often() -> None:
    relays = Relays([f"w{k}" for k in range(20)])
    dials: dict[str, list[float]] = {}
    real = relays._connect

    def connect(name: str, peer: str, lane: int) -> None:
        if peer == SEED:
            dials.setdefault(name, []).append(round(relays.now, 2))
        real(name, peer, lane)

    relays._connect = connect  # type: ignore[method-assign]
    relays.run(1.0)
    relays.publish_chain(MANIFEST, [f"w{k}" for k in range(20)])
    dials.clear()
    relays.kill(SEED)
    relays.run(60.0)
    assert all(len(times) <= 12 for times in dials.values()), "with an object under way, too"
    assert len({times[-1] for times in dials.values()}) >= 10


def test_h01_a_chunk_that_takes_a_slow_line_longer_than_a_silent_source_is_given_is_no_silence() -> None:
    chunk_bytes = 2**20
    relays = Relays(["a"], rate_bytes_per_s=chunk_bytes / (3 * SILENT_S))
    relays.run(5.0)
    manifest = msgspec.structs.replace(
        MANIFEST, chunk_size=chunk_bytes, object_size=3 * chunk_bytes, chunks=("0" * 64,) * 3
    )
    relays.publish_chain(manifest, ("a",))
    relays.run_until_whole(ROOT, ["a"], 70.0)
    assert relays.nodes["a"].report().accused == ()
    assert relays.nodes["a"].tally().reparentings == 0
    assert relays.events("relay_reparented") == []


def test_a_chunk_that_cannot_be_read_is_refused_and_asked_for_again() -> None:
    relays = joined(("a",))
    relays.publish_chain(MANIFEST, ("a",))
    relays.run(0.5)
    seed = relays.nodes[SEED]
    link, stream = next((link, stream) for link in seed._links for stream in link.servings)
    seed.unreadable(link.number, stream)
    relays.act(SEED)
    relays.run_until_whole(ROOT, ["a"], 30.0)
    assert "refused" in str(relays.events("relay_reparented"))


def test_chunks_of_an_earlier_life_of_an_object_do_not_count_in_the_next() -> None:
    relays = joined(("a",))
    relays.publish_chain(MANIFEST, ("a",))
    relays.run(0.5)
    node = relays.nodes["a"]
    (stream,) = [feed.stream for intake in node._receiver for feed in intake.feeds]
    assert stream is not None
    node.withdraw(ROOT)
    node.bring(MANIFEST, relays.now)
    node.opened(ROOT, bytearray(COUNT), relays.now)
    node.stored(ROOT, stream, 3, relays.now)
    assert node.report().progress == {ROOT: 0}


def test_when_every_source_is_slow_the_line_is_and_nobody_stays_accused() -> None:
    relays = joined(("p", "g", "c"))
    relays.publish_chain(object_manifest(2000), ("p", "g", "c"))
    relays.run(1.0)
    node = relays.nodes["c"]
    (feed,) = [feed for intake in node._receiver for feed in intake.feeds]
    node._receiver._blame(feed, relays.now)
    assert node.report().accused == ("g",)
    feed.turn(set(), relays.now)
    node._receiver._blame(feed, relays.now)
    assert node.report().accused == ()


def test_a_failure_of_our_own_says_nothing_of_the_peer() -> None:
    relays = joined(("a", "b"))
    relays.nodes["a"].dial_failed("b", 0, "too many open files", relays.now, missed=False)
    assert relays.nodes["a"].report().unreachable == ()
    relays.nodes["a"].dial_failed("b", 0, "refused", relays.now)
    assert relays.nodes["a"].report().unreachable == ("b",)


def test_h05_a_node_that_is_late_all_the_time_notices_a_dead_link_all_the_same() -> None:
    node = Node("a", f.Source(SEED, "seed.test", 1))
    node.link_up(1, SEED, True, 0, 0.0)
    for k in range(1, 6):
        node.tick({}, 0.7 * k)
    assert any(isinstance(action, Hangup) for action in node.take())


def test_h01_bytes_that_tls_has_not_decrypted_yet_are_a_sign_of_life() -> None:
    node = Node("a", f.Source(SEED, "seed.test", 1))
    node.link_up(1, SEED, True, 0, 0.0)
    for k in range(1, 60):
        node.tick({1: 500 * k}, 0.1 * k)
    assert not any(isinstance(action, Hangup) for action in node.take())


def test_connections_to_the_seed_that_fail_beside_one_that_stands_do_not_make_the_pause_grow() -> None:
    node = Node("a", f.Source(SEED, "seed.test", 1), lanes=4)
    for k in range(12):
        node.dial_failed(SEED, 1, "refused", 20.0 * k)
        node.link_up(10 + k, SEED, True, 2, 20.0 * k + 5.0)
        node.tick({}, 20.0 * k + 19.0)
    node.dial_failed(SEED, 1, "refused", 1000.0)
    node.tick({}, 1000.6)
    assert not node._redial.rests


def test_h05_who_does_not_hear_the_seed_either_tells_of_nobody_that_it_could_not_be_dialled() -> None:
    """It is cut off itself, perhaps: its parents shall not lose their places for that."""
    relays = joined(("a", "b"))
    relays.kill(SEED)
    relays.run(1.0)
    relays.nodes["a"].dial_failed("b", 0, "no route to host", relays.now)
    assert relays.nodes["a"].report().unreachable == ()


def test_a_source_that_sent_a_wrong_chunk_is_not_asked_again_when_the_plan_changes() -> None:
    relays = joined(("a", "b", "c"))
    relays.corrupt.add("b")
    relays.publish_chain(MANIFEST, ("a", "b", "c"))
    relays.run(1.0)
    assert relays.events("relay_wrong_chunk")
    everything = (Stretch(0, COUNT),)
    changed = f.Feed((relays.source("b"), relays.source(SEED)), everything, relays.rate, True)
    relays.assign("c", f.Assign(2, b"signed", (changed,), (), 0), MANIFEST)
    relays.run_until_whole(ROOT, ["c"], 30.0)
    assert len(relays.events("relay_wrong_chunk")) == 1


def test_a_child_of_an_object_that_made_room_for_newer_ones_is_refused_at_once() -> None:
    relays = joined(("a", "b"))
    oldest = object_manifest(COUNT, 2)
    relays.publish_chain(oldest, ("a", "b"))
    relays.run_until_whole(oldest.object_root, ["a", "b"], 30.0)
    (link,) = [link for link in relays.nodes["a"]._links if link.peer == "b"]
    relays.nodes["a"].control(link.number, f.Want(99, oldest.object_root, (), True, b""), relays.now)
    assert link.servings
    for version in range(3, 4 + KEPT_OBJECTS):
        manifest = object_manifest(1, version)
        relays.assign("a", f.Assign(1, b"signed", (), ("b",), 1), manifest)
        relays.nodes["a"].opened(manifest.object_root, bytearray(b"\1"), relays.now)
    relays.assign("a", f.Assign(1, b"signed", (), ("b",), 1), object_manifest(1, 99))
    assert relays.nodes["a"]._receiver.get(oldest.object_root) is None
    assert link.servings == {}


def disturb(relays: Relays, fault: str, name: str) -> None:
    match fault:
        case "kill" if name not in relays.dead:
            relays.kill(name)
        case "freeze":
            relays.frozen.add(name)
        case "thaw":
            relays.frozen.clear()
        case "corrupt":
            relays.corrupt.add(name)
        case "slow":
            relays.slow[name] = 0.05
        case "unreachable":
            relays.unreachable.add(name)
        case "hold back" if name not in relays.dead:
            relays.stop_chunks(name)
        case "refuse" if name not in relays.dead:
            for link in relays.nodes[name]._links:
                for stream in list(link.servings):
                    relays.nodes[name].unreadable(link.number, stream)
            relays.act(name)


FAULTS = ("kill", "freeze", "thaw", "corrupt", "slow", "unreachable", "hold back", "refuse")


@pytest.mark.parametrize("topology", [Topology.CHAIN, Topology.RING, Topology.TREE])
def test_i7_whatever_fails_on_the_way_everybody_that_lives_gets_the_object(topology: Topology) -> None:
    for seed in range(25):
        random = Random(f"{topology} {seed}")
        names = tuple(f"w{k}" for k in range(random.choice((1, 3, 6))))
        manifest = object_manifest(random.choice((1, 2, 60)))
        relays = joined(names, lanes=random.choice((1, 4)))
        nodes = [PlannedNode(name, random.choice((2e6, 6e6)), 6e6) for name in names]
        plan = make_plan(topology, nodes, 12e6, manifest.object_size, CHUNK_BYTES, relays.latency_s, 1.1)
        relays.nodes[SEED].publish(manifest, relays.now)
        for name, part in Assignments(b"signed").update(plan, {name: relays.source(name) for name in (SEED, *names)}):
            relays.assign(name, part, manifest)
        for _ in range(random.randrange(6)):
            relays.run(random.choice((0.05, 0.3, 1.0, 4.0)))
            disturb(relays, random.choice(FAULTS), random.choice(names))
        relays.frozen.clear()
        if alive := [name for name in names if name not in relays.dead]:
            relays.run_until_whole(manifest.object_root, alive, 60.0)
