from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from fluid_fleet import BASE, MB, NEXT, FluidFleet, facts

from echo2.broadcast.director.director import REVISE_S
from echo2.broadcast.director.fleet import PROBE_AGAIN_S
from echo2.broadcast.director.pacing import HELD
from echo2.broadcast.plan.model import SEED, Stream, Topology
from echo2.broadcast.relay.frames import Assign, Report, Source

NAMES = [f"w{k:02}" for k in range(16)]


def fleet_of(
    up_mb: float = 5.0, down_mb: float = 5.0, uplink_mb: float = 40.0, topology: Topology = Topology.CHAIN,
    unreachable: tuple[str, ...] = (), count: int = 16,
) -> FluidFleet:  # fmt: skip
    return FluidFleet(dict.fromkeys(NAMES[:count], (up_mb, down_mb)), uplink_mb, topology, unreachable)


def standing(fleet: FluidFleet) -> FluidFleet:
    """Everybody joined at once and the links are warm."""
    fleet.join()
    fleet.run(4 * REVISE_S)
    return fleet


# ---- the standing plan ---------------------------------------------------------------------------------------------


def test_warm_ups_alone_lead_to_as_many_chains_as_the_uplink_feeds() -> None:
    fleet = standing(fleet_of())
    assert len(fleet.heads()) == 8
    assert fleet.director.nodes()[0].up_bytes_per_s == pytest.approx(5 * MB, rel=0.01)


def test_broadcast_after_broadcast_the_plan_stays_and_takes_as_long_as_it_said() -> None:
    fleet = standing(fleet_of())
    links = fleet.parents()
    for version, name in enumerate("1234", start=2):
        delta = facts(name, version)
        took_s = fleet.broadcast(delta)
        assert took_s == pytest.approx(fleet.director.predicted_s, rel=0.05)
        assert fleet.director.predicted_s == pytest.approx(fleet.director.bound_s, rel=0.02)
        assert fleet.parents(delta) == fleet.parents() == links


def test_lines_that_became_twice_as_fast_are_found_out_although_streams_are_held() -> None:
    fleet = standing(fleet_of())
    names = iter("abcdefghijklmnopqrstuvwxyz")
    for version in range(2, 6):
        fleet.broadcast(facts(next(names), version))
    before_s = fleet.broadcast(facts(next(names), 6))
    assert any(part.feeds[0].pace_bytes_per_s for part in fleet.nodes["w00"].parts.values() if part.feeds), "it is held"
    fleet.uplink *= 2
    for node in fleet.nodes.values():
        node.up, node.down = 2 * node.up, 2 * node.down
    took_s = [fleet.broadcast(facts(next(names), version)) for version in range(7, 7 + HELD + 4)]
    assert took_s[-1] == pytest.approx(before_s / 2, rel=0.05)
    assert len(fleet.heads()) == 8


def test_nodes_that_come_one_by_one_are_soon_in_as_many_chains() -> None:
    """One warm-up at a time shows little of the uplink: it is tried a little further with every broadcast."""
    fleet = fleet_of()
    for name in NAMES:
        fleet.join(name)
        fleet.run(1.0)
    fleet.run(4.0)
    slowest_s = max(fleet.broadcast(facts(name, version)) for version, name in enumerate("123456", start=2))
    assert len(fleet.heads()) == 8
    assert slowest_s < 1.3 * 20
    settled = fleet.parents()
    for version, name in enumerate("789", start=8):
        assert fleet.broadcast(facts(name, version)) == pytest.approx(20, rel=0.02)
        assert fleet.parents() == settled


def test_many_changes_at_once_make_one_plan() -> None:
    fleet = fleet_of()
    for name in NAMES:
        fleet.join(name)
        fleet.run(0.1)
    told = [name for name, _ in fleet.messages]
    assert not told
    fleet.run(0.4)
    assert sorted(name for name, _ in fleet.messages) == NAMES


def test_a_fleet_that_never_rests_is_planned_all_the_same() -> None:
    fleet = fleet_of()
    for _ in range(4):
        for name in NAMES:
            fleet.leave(*fleet.connected & {name})
            fleet.join(name)
            fleet.run(0.1)
    assert fleet.messages


def test_a_node_that_leaves_moves_only_those_behind_it() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    before = fleet.parents()
    gone = next(name for name in NAMES if before[name] == fleet.heads()[0])
    fleet.messages.clear()
    fleet.leave(gone)
    fleet.run(1.0)
    assert fleet.parents() == {
        name: before[gone] if parent == gone else parent for name, parent in before.items() if name != gone
    }
    assert len(fleet.heads()) == 2


def test_slow_nodes_are_found_out_and_stand_at_the_tails() -> None:
    slow = NAMES[:4]
    rates = {name: (1.0, 1.0) if name in slow else (5.0, 5.0) for name in NAMES}
    fleet = standing(FluidFleet(rates, 20))
    assert all(name in slow for name, parent in fleet.parents().items() if parent in slow)
    assert len(fleet.heads()) == 4
    for version, name in enumerate("123", start=2):
        delta = facts(name, version)
        fleet.publish(delta)
        fleet.run(22.0)
        assert {x for x in NAMES if delta.root in fleet.nodes[x].report.complete} == set(NAMES) - set(slow)
        fleet.run(100.0)


def test_uploads_slower_than_downloads_are_helped_out_by_the_seed() -> None:
    """10 Mbit/s up, 50 down, B_0 = 400; nobody ever said so."""
    fleet = standing(fleet_of(up_mb=1.25, down_mb=6.25, uplink_mb=50))
    for version, name in enumerate("123", start=2):
        assert fleet.broadcast(facts(name, version)) < 1.1 * 100 / (35 / 8)


def test_a_seed_slower_than_its_nodes_feeds_a_tree_and_keeps_to_it() -> None:
    fleet = standing(fleet_of(up_mb=12.5, down_mb=12.5, uplink_mb=6.0))
    for version, name in enumerate("1234", start=2):
        fleet.broadcast(facts(name, version))
        parents = list(fleet.parents().values())
        assert len(fleet.heads()) == 1
        assert max(map(parents.count, parents)) == 2


@pytest.mark.parametrize("topology", list(Topology))
def test_h11_nodes_that_cannot_be_dialled_are_nobodys_parents(topology: Topology) -> None:
    fleet = standing(fleet_of(topology=topology, unreachable=("w00", "w05")))
    delta = facts()
    fleet.broadcast(delta)
    assert not {"w00", "w05"} & {*fleet.parents().values(), *fleet.parents(delta).values()}


def test_h11_a_node_that_another_could_not_dial_is_a_tail_from_then_on_and_people_see_it() -> None:
    fleet = standing(fleet_of())
    feeding = sorted(set(fleet.parents().values()) - {SEED})
    fleet.say(
        next(child for child, parent in fleet.parents().items() if parent == feeding[0]), unreachable=(feeding[0],)
    )
    fleet.run(3.0)
    assert feeding[0] not in fleet.parents().values()
    assert [state.node_id for state in fleet.director.nodes() if not state.reachable] == [feeding[0]]


def test_a_node_that_could_not_be_dialled_back_feeds_others_once_it_can_be() -> None:
    fleet = standing(fleet_of(unreachable=("w00",)))
    assert fleet.director.probes_due(fleet.now + PROBE_AGAIN_S) == [Source("w00", "w00.test", 7000)]
    fleet.director.reachability(Source("w00", "w00.test", 7000), True, fleet.now)
    fleet.run(3.0)
    assert all(state.reachable for state in fleet.director.nodes())


def test_a_fleet_that_changes_in_the_middle_of_a_long_transfer_does_not_end_what_is_measured_of_it() -> None:
    fleet = standing(fleet_of())
    fleet.publish(facts())
    fleet.run(0.3)
    seen = fleet.director._fleet.rates._round
    fleet.director.node_joined("late", "late.test", 7000, fleet.now)
    for _ in range(120):
        fleet.now += 0.1
        fleet.director.tick(fleet.now)
    assert fleet.director._fleet.rates._round is seen


def test_a_star_has_no_peers_even_for_those_who_come_late() -> None:
    fleet = fleet_of(topology=Topology.STAR)
    fleet.join(*NAMES[:12])
    fleet.run(4.0)
    fleet.publish(facts())
    fleet.run(3.0)
    fleet.join(*NAMES[12:])
    fleet.run(60.0)
    assert set(fleet.parents(facts()).values()) == {SEED}
    assert all(facts().root in fleet.nodes[name].report.complete for name in NAMES)


def test_a_ring_takes_little_of_the_seed() -> None:
    fleet = standing(fleet_of(topology=Topology.RING))
    delta = facts()
    fleet.broadcast(delta)
    part = fleet.nodes[fleet.heads(delta)[0]].parts[delta.manifest] if fleet.heads(delta) else None
    assert part is None, "the first source of everybody is a peer"
    from_seed = [x for n in NAMES for x in fleet.nodes[n].parts[delta.manifest].feeds if x.sources[0].node_id == SEED]
    assert sum(y.count for x in from_seed for y in x.stretches) == -(-delta.size_bytes // delta.chunk_bytes)
    assert not any(x.spills for x in from_seed)


# ---- objects -------------------------------------------------------------------------------------------------------


def test_a_delta_goes_at_once_to_those_that_hold_its_base_along_their_warm_links() -> None:
    fleet = standing(fleet_of(uplink_mb=20))
    without = ("w03", "w08")
    for name in without:
        fleet.say(name, held=())
    fleet.messages.clear()
    fleet.publish(facts())
    assert next(name for name, _ in fleet.director.take()) == SEED
    fleet.director.withdraw(facts().root)
    fleet.publish(facts())
    fleet.run(0.1)
    planned = fleet.parents(facts())
    assert set(planned) == set(NAMES) - set(without)
    warm = fleet.parents()
    assert all(parent == warm[name] for name, parent in planned.items() if warm[name] not in without)


def test_every_node_is_told_after_its_parent_and_knows_the_way_up_to_the_seed() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    fleet.messages.clear()
    fleet.publish(facts())
    fleet.run(0.1)
    told = [name for name, _ in fleet.messages]
    for name, assign in fleet.messages[1:]:
        (feed,) = assign.feeds
        assert [source.node_id for source in feed.sources][-1] == SEED
        assert told.index(feed.sources[0].node_id) < told.index(name)
        assert feed.sources[0] in (
            Source(SEED, "", 0),
            Source(feed.sources[0].node_id, f"{feed.sources[0].node_id}.test", 7000),
        )
    seed = fleet.messages[0][1]
    assert (seed.feeds, len(seed.children), seed.planned_children) == ((), 16, 2)


def test_an_anchor_goes_to_those_that_ask_and_they_share_it() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    anchor = facts("a", base_root="")
    fleet.publish(anchor)
    fleet.run(1.0)
    assert not fleet.parents(anchor)
    asking = ("w01", "w02", "w05", "w06", "w09")
    for name in asking:
        fleet.run(0.1)
        fleet.say(name, needs=(anchor.root,))
    fleet.run(0.3)
    assert set(fleet.parents(anchor)) == set(asking)
    assert len(fleet.heads(anchor)) == 2
    fleet.run(60.0)
    assert all(anchor.root in fleet.nodes[name].report.complete for name in asking)


def test_who_asks_later_is_fed_by_a_node_that_has_it_already() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    anchor = facts("a", base_root="")
    fleet.publish(anchor)
    for name in ("w01", "w02"):
        fleet.say(name, needs=(anchor.root,))
    fleet.run(40.0)
    generation = fleet.nodes["w01"].parts[anchor.manifest].generation
    for name in ("w07", "w08", "w09"):
        fleet.say(name, needs=(anchor.root,))
    fleet.run(1.0)
    parents = fleet.parents(anchor)
    assert {parents["w07"], parents["w08"]} == {"w01", "w02"}
    assert parents["w09"] in ("w07", "w08")
    assert fleet.nodes["w01"].parts[anchor.manifest].generation > generation
    fleet.run(40.0)
    assert anchor.root in fleet.nodes["w09"].report.complete


def test_who_joins_in_the_middle_is_hung_behind_a_tail_and_nobody_else_is_told() -> None:
    fleet = fleet_of(uplink_mb=10)
    fleet.join(*NAMES[:12])
    fleet.run(4.0)
    fleet.publish(facts())
    fleet.run(4.0)
    before = fleet.parents(facts())
    fleet.messages.clear()
    fleet.join("w12")
    fleet.run(2.0)
    after = fleet.parents(facts())
    assert after.pop("w12") in set(before) - set(before.values())
    assert after == before
    told = {name for name, assign in fleet.messages if assign.manifest}
    assert told <= {SEED, "w12", *before.values(), after.get("w12", ""), *(set(before) - set(before.values()))}
    assert not any(not assign.manifest for _, assign in fleet.messages), "links are not warmed while bytes flow"
    fleet.run(60.0)
    assert facts().root in fleet.nodes["w12"].report.complete


def test_a_node_that_gets_the_base_later_gets_the_newest_delta_unasked() -> None:
    fleet = standing(fleet_of())
    fleet.say("w03", held=())
    fleet.publish(facts("d", 2))
    fleet.run(60.0)
    assert facts("d").root not in fleet.nodes["w03"].report.complete
    fleet.say("w03", held=(BASE,))
    fleet.run(40.0)
    assert facts("d").root in fleet.nodes["w03"].report.complete


def test_who_has_the_result_is_not_sent_the_delta() -> None:
    fleet = standing(fleet_of())
    fleet.say("w03", held=(BASE, NEXT))
    fleet.publish(facts())
    fleet.run(60.0)
    assert "w03" not in fleet.parents(facts())


def test_what_is_withdrawn_is_planned_for_nobody() -> None:
    fleet = standing(fleet_of())
    fleet.publish(facts("a", base_root=""))
    fleet.director.withdraw(facts("a").root)
    fleet.say("w00", needs=(facts("a").root,))
    fleet.run(2.0)
    assert not fleet.parents(facts("a"))


def test_publishing_twice_is_publishing_once() -> None:
    fleet = standing(fleet_of())
    fleet.publish(facts())
    assert fleet.director.take()
    fleet.publish(facts())
    assert not fleet.director.take()


# ---- failures ------------------------------------------------------------------------------------------------------


def test_when_a_node_leaves_nobody_has_to_be_told() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    fleet.publish(facts())
    fleet.run(4.0)
    gone = fleet.parents(facts())["w15"]
    fleet.messages.clear()
    fleet.leave(gone)
    fleet.run(4.0)
    assert not [name for name, assign in fleet.messages if assign.manifest]
    fleet.run(60.0)
    assert all(facts().root in fleet.nodes[name].report.complete for name in NAMES if name != gone)


def test_a_node_that_comes_back_in_the_middle_is_told_its_part_again_and_nobody_else_anything() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    fleet.publish(facts())
    fleet.run(4.0)
    gone = fleet.parents(facts())["w15"]
    part = fleet.nodes[gone].parts[facts().manifest]
    fleet.leave(gone)
    fleet.run(1.0)
    fleet.messages.clear()
    fleet.join(gone)
    fleet.run(1.0)
    told = [(name, assign) for name, assign in fleet.messages if assign.manifest]
    assert [name for name, _ in told] == [gone]
    assert told[0][1].feeds == part.feeds


def test_a_node_at_another_address_is_named_at_the_new_one() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    fleet.publish(facts())
    fleet.run(1.0)
    parents = fleet.parents(facts())
    moved = next(parent for parent in parents.values() if parent != SEED)
    child = next(name for name in NAMES if parents[name] == moved)
    fleet.director.node_joined(moved, "elsewhere.test", 7001, fleet.now)
    fleet.run(0.2)
    assert fleet.nodes[child].parts[facts().manifest].feeds[0].sources[0] == Source(moved, "elsewhere.test", 7001)


def test_an_accused_node_feeds_nobody_in_later_plans() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    head = fleet.heads()[0]
    child = next(name for name, parent in fleet.parents().items() if parent == head)
    fleet.say(child, accused=(head,))
    fleet.broadcast(facts("1", 2))
    fleet.broadcast(facts("2", 3))
    assert head not in fleet.parents().values()
    assert head not in fleet.parents(facts("2")).values()


def test_a_slow_node_is_passed_by_and_becomes_a_tail() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    fleet.publish(facts())
    fleet.run(0.5)
    parents = fleet.parents(facts())
    slow = next(parent for parent in parents.values() if parent != SEED and parents[parent] != SEED)
    child = next(name for name in NAMES if parents[name] == slow)
    fleet.nodes[slow].down = 0.5 * MB
    fleet.run(8.0)
    after = fleet.parents(facts())
    assert after[child] == parents[slow]
    assert slow not in after.values()
    changed = {name for name in NAMES if after[name] != parents[name]}
    assert changed == {child, slow}
    fleet.run(20.0)
    whole = {name for name in NAMES if facts().root in fleet.nodes[name].report.complete}
    assert whole == set(NAMES) - {slow}


def test_h05_a_seed_that_stood_still_passes_nobody_by_for_what_it_has_not_read_yet() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    fleet.publish(facts())
    fleet.run(0.5)
    parents = fleet.parents(facts())
    late = next(parent for parent in parents.values() if parent != SEED and parents[parent] != SEED)
    down, fleet.nodes[late].down = fleet.nodes[late].down, 0.5 * MB
    fleet.run(2.0)
    (transfer,) = fleet.director._transfers.values()
    assert late in transfer._slow_since
    fleet.nodes[late].down = down
    fleet.now += 4.0
    fleet.director.tick(fleet.now)
    assert fleet.director.take() == []
    assert late not in fleet.director._fleet.distrusted(fleet.now)


def test_a_slow_head_is_passed_by_too_and_a_slow_tail_is_left_alone() -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    fleet.publish(facts())
    fleet.run(0.5)
    parents = fleet.parents(facts())
    head = fleet.heads(facts())[0]
    tail = next(name for name in NAMES if name not in parents.values())
    fleet.nodes[head].down = fleet.nodes[tail].down = 0.5 * MB
    fleet.run(8.0)
    after = fleet.parents(facts())
    assert after[head] != SEED
    assert after[tail] == parents[tail]
    assert len(fleet.heads(facts())) == 2


@pytest.mark.parametrize("finished", [False, True])
def test_a_seed_that_starts_again_goes_on_where_nodes_are(finished: bool) -> None:
    fleet = standing(fleet_of(uplink_mb=10))
    fleet.publish(facts())
    fleet.run(30.0 if finished else 8.0)
    got = {name: fleet.nodes[name].got[facts().manifest] for name in NAMES}
    assert finished or max(got.values()) < facts().size_bytes
    fleet.restart_seed()
    fleet.messages.clear()
    for name in NAMES:
        fleet.publish(facts()) if name == "w04" else None
        fleet.join(name)
        fleet.run(0.1)
    fleet.run(1.0)
    assert finished == (not any(assign.manifest for _, assign in fleet.messages))
    fleet.run(40.0)
    assert all(facts().root in fleet.nodes[name].report.complete for name in NAMES)


def test_a_node_that_lost_what_it_had_is_told_its_part_again() -> None:
    fleet = standing(fleet_of())
    fleet.broadcast(facts())
    fleet.messages.clear()
    fleet.say("w03", complete=(), progress={}, needs=(facts().root,))
    fleet.run(0.3)
    assert [name for name, assign in fleet.messages if assign.manifest] == ["w03"]


def test_reports_of_unknown_nodes_and_strange_reachability_are_nothing() -> None:
    fleet = fleet_of()
    fleet.director.report("stranger", Report(), 0.0)
    fleet.director.reachability(Source("stranger", "stranger.test", 7000), True, 0.0)
    fleet.director.tick(1.0)
    assert fleet.director.take() == []
    assert fleet.director.nodes() == ()


def test_who_says_again_and_again_that_it_cannot_dial_another_makes_few_new_plans() -> None:
    fleet = standing(fleet_of())
    made: set[float] = set()
    for k in range(120):
        fleet.say("w00", unreachable=() if k % 2 else ("w05",))
        fleet.run(0.5)
        made.add(fleet.director._stood_s)
    assert len(made) <= 5


class Looked(tuple[Stream, ...]):
    """Streams that know how often they were looked through."""

    times = 0

    def __iter__(self) -> Iterator[Stream]:
        Looked.times += 1
        return super().__iter__()


def test_a_late_comers_parent_is_found_without_looking_through_the_plan_for_every_candidate() -> None:
    fleet = standing(fleet_of())
    fleet.publish(facts())
    fleet.run(1.0)
    (transfer,) = fleet.director._transfers.values()
    assert transfer.plan is not None
    transfer.plan = msgspec.structs.replace(transfer.plan, streams=Looked(transfer.plan.streams))
    assert len(fleet.director._candidates(transfer, fleet.now)) == 1 + len(NAMES)
    assert Looked.times < len(NAMES) / 2


def test_people_see_who_is_connected_and_whose_child_it_is() -> None:
    fleet = standing(fleet_of(uplink_mb=10, unreachable=("w02",)))
    fleet.say("w01", sent_bytes=7, received_bytes=9, reparentings=1)
    states = {state.node_id: state for state in fleet.director.nodes()}
    assert list(states) == NAMES
    assert (states["w01"].sent_bytes, states["w01"].received_bytes, states["w01"].reparentings) == (7, 9, 1)
    assert {name: state.parent for name, state in states.items()} == fleet.parents()
    assert [name for name, state in states.items() if not state.reachable] == ["w02"]


def test_the_same_events_give_the_same_assignments() -> None:
    def play() -> list[tuple[str, Assign]]:
        fleet = standing(fleet_of())
        fleet.broadcast(facts())
        return fleet.messages

    assert play() == play()
