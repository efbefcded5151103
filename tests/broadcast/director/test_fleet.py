from __future__ import annotations

from itertools import pairwise

from echo2.broadcast.director.fleet import PROBATION_S, Fleet
from echo2.broadcast.plan.model import SEED, Node
from echo2.broadcast.relay.frames import Report, Source

MB = 1e6
NAMES = tuple("abcdefghi")


def fleet_of(names: tuple[str, ...] = NAMES) -> Fleet:
    fleet = Fleet()
    for name in names:
        fleet.join(Source(name, f"{name}.test", 1))
        fleet.members[name].reachable = True
    return fleet


def accuse(fleet: Fleet, accuser: str, *accused: str, now: float = 0.0) -> None:
    fleet.report(accuser, Report(accused=accused), now)


def leaves(fleet: Fleet, now: float = 1.0) -> set[str]:
    return {node.node_id for node in fleet.nodes(list(fleet.members), now) if not node.reachable}


def test_who_is_accused_feeds_nobody_for_a_while() -> None:
    fleet = fleet_of()
    accuse(fleet, "b", "a")
    assert leaves(fleet) == {"a"}
    accuse(fleet, "b", "a", now=PROBATION_S - 1)
    assert leaves(fleet, PROBATION_S + 1) == set(), "it is still the same accusation"


def test_who_does_wrong_again_long_after_feeds_nobody_again() -> None:
    fleet = fleet_of()
    accuse(fleet, "b", "a")
    fleet.leave("b")
    fleet.join(Source("b", "b.test", 1))
    accuse(fleet, "b", now=PROBATION_S)
    assert leaves(fleet, PROBATION_S + 1) - {"b"} == set()
    accuse(fleet, "b", "a", now=PROBATION_S + 2)
    assert "a" in leaves(fleet, PROBATION_S + 3)


def test_an_accuser_that_only_connects_again_accuses_nobody_anew() -> None:
    fleet = fleet_of()
    accuse(fleet, "b", "a")
    fleet.leave("b")
    fleet.join(Source("b", "b.test", 1))
    accuse(fleet, "b", "a", now=PROBATION_S - 1)
    assert "a" not in leaves(fleet, PROBATION_S + 1)


def test_who_accuses_many_is_itself_the_slow_one() -> None:
    fleet = fleet_of()
    accuse(fleet, "b", "a", "c", "d")
    assert leaves(fleet) == {"b"}


def test_when_much_of_the_fleet_is_accused_the_plan_was_wrong() -> None:
    fleet = fleet_of()
    for accuser, accused in ("ab", "cd", "ef"):
        accuse(fleet, accuser, accused)
    assert leaves(fleet) == {"b", "d", "f"}
    accuse(fleet, "g", "h")
    assert leaves(fleet) == set()


def test_who_was_far_slower_than_the_others_feeds_nobody_either() -> None:
    fleet = fleet_of()
    fleet.demote("c", 0.0)
    assert leaves(fleet) == {"c"}


def test_accusations_of_strangers_are_not_kept() -> None:
    fleet = fleet_of()
    accuse(fleet, "a", *(f"stranger{k}" for k in range(200)))
    assert leaves(fleet) == set()


def test_a_node_is_not_reachable_until_it_was_dialled_back() -> None:
    fleet = Fleet()
    fleet.join(Source("a", "a.test", 1))
    assert not fleet.node("a", 0.0).reachable
    assert fleet.where() == {SEED: Source(SEED, "", 0), "a": Source("a", "a.test", 1)}


def miss(fleet: Fleet, name: str, *peers: str) -> None:
    fleet.report(name, Report(unreachable=peers), 0.0)


def test_h11_whom_a_peer_could_not_dial_feeds_nobody_until_it_could_or_the_other_joined_anew() -> None:
    fleet = fleet_of()
    miss(fleet, "a", "b")
    assert leaves(fleet) == {"b"}
    miss(fleet, "a")
    assert leaves(fleet) == set()
    miss(fleet, "a", "b")
    fleet.join(Source("b", "b.test", 2))
    fleet.members["b"].reachable = True
    assert leaves(fleet) == set()
    miss(fleet, "a", "b", "c")
    assert leaves(fleet) == {"c"}, "what was said of an earlier life is not said of this one"
    fleet.leave("a")
    assert leaves(fleet) == set()


def test_who_cannot_dial_many_is_itself_the_one_that_is_cut_off() -> None:
    fleet = fleet_of()
    miss(fleet, "a", "b", "c", "d", "stranger")
    assert leaves(fleet) == set()


def test_an_answer_about_an_earlier_life_says_nothing_of_this_one() -> None:
    fleet = Fleet()
    before, now = Source("a", "a.test", 1), Source("a", "a.test", 2)
    fleet.join(before)
    fleet.join(now)
    assert fleet.probed(now, True, 0.0)
    assert not fleet.probed(before, False, 1.0)
    assert not fleet.probed(Source("stranger", "x.test", 1), True, 1.0)
    assert leaves(fleet) == set()


def test_who_could_not_be_dialled_back_is_tried_again_less_and_less_often() -> None:
    fleet = Fleet()
    source, now, pauses = Source("a", "a.test", 1), 0.0, []
    fleet.join(source)
    for _ in range(7):
        fleet.probed(source, False, now)
        pause = next(s for s in range(2000) if fleet.probes_due(now + s))
        assert fleet.probes_due(now + pause) == [], "told once"
        pauses.append(pause)
        now += pause
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    assert fleet.probed(source, True, now)
    assert fleet.probes_due(now + 1e6) == []


def measure(fleet: Fleet, rate_mb: float) -> None:
    for parent, child in pairwise(NAMES):
        fleet.report(child, Report(edges={parent: rate_mb * MB}), 0.0)


def test_only_what_changed_materially_is_news() -> None:
    fleet = fleet_of()
    assert fleet.moved()
    fleet.adopt()
    assert not fleet.moved()
    fleet.rates.begin(dict.fromkeys(pairwise(NAMES), 12.5 * MB), relayed=False)
    measure(fleet, 12.0)
    assert not fleet.moved()
    measure(fleet, 16.0)
    assert fleet.moved()
    assert fleet.node("a", 0.0) == Node("a", 12.5 * MB, 12.5 * MB), "plans go on with what was adopted"
    fleet.adopt()
    assert fleet.node("a", 0.0) == Node("a", 16 * MB, 16 * MB)


def test_an_uplink_that_changed_is_news() -> None:
    fleet = fleet_of()
    fleet.adopt()
    fleet.rates.egress(30 * MB)
    assert fleet.moved()
    fleet.adopt()
    assert fleet.uplink == 30 * MB
    assert not fleet.moved()


def test_a_node_whose_earlier_link_ended_unnoticed_leaves_nothing_behind() -> None:
    fleet = fleet_of()
    miss(fleet, "a", "b")
    fleet.join(Source("a", "a.test", 2))
    fleet.report("a", Report(), 1.0)
    fleet.leave("a")
    assert leaves(fleet) == set()


def test_who_once_missed_many_is_not_believed_when_it_misses_few_later() -> None:
    fleet = fleet_of()
    miss(fleet, "a", "b", "c", "d")
    miss(fleet, "a", "b")
    assert leaves(fleet) == set()
