"""Events of a scenario, brought upon a world."""

from __future__ import annotations

from typing import Any

import pytest
from scenarios import scenario

from echo2.simulation.play import Played, play

OFFERS = [{"name": "rented", "usd_per_h": 1.0, "start_s": 5.0, "count": 4}]
RENTED: dict[str, Any] = {"workers": [], "offers": OFFERS, "run": {"steps": 14}, "provisioning": {"period_s": 20.0}}


def told(*events: dict[str, Any], **changes: Any) -> Played:
    return play(scenario(events=list(events), **changes))


def kinds(played: Played, kind: str) -> list[dict[str, Any]]:
    return [event for event in played.run.events if event["kind"] == kind]


def killed(played: Played) -> list[tuple[str, float]]:
    return [(event["program"], event["at_s"]) for event in kinds(played, "killed")]


def joined(played: Played, name: str) -> list[float]:
    return [event["at_s"] for event in kinds(played, "joined") if event["who"] == name]


def test_a_pattern_means_workers_alone() -> None:
    played = told({"what": "kill", "who": "*", "at_s": 50.0, "for_s": 10.0})
    assert killed(played) == [("card-1", 50.0), ("card-2", 50.0), ("card-3", 50.0)]
    for name in ("card-1", "card-2", "card-3"):
        assert len(joined(played, name)) == 2
        assert joined(played, name)[1] >= 60.0


@pytest.mark.parametrize("at_s", [0.5, 1.2, 1.6, 1.9, 2.4, 2.6, 45.0])
def test_whoever_is_killed_comes_back_whatever_it_was_doing(at_s: float) -> None:
    """Snapshots are on their way at about 2 s; a transfer that fails with its program must not save it."""
    played = told({"what": "kill", "who": "*", "at_s": at_s, "for_s": 10.0})
    assert all(len(joined(played, f"card-{number}")) >= 1 for number in (1, 2, 3))
    returned = {event["who"] for event in kinds(played, "joined") if event["at_s"] >= at_s + 10.0}
    assert returned == {"card-1", "card-2", "card-3"}
    assert played.outcome.steps == 8


def test_no_more_than_so_many() -> None:
    assert [name for name, _ in killed(told({"what": "kill", "most": 2, "at_step": 2, "for_s": 1.0}))] == [
        "card-1", "card-2",
    ]  # fmt: skip


def test_all_programs_at_once() -> None:
    at = {"at_s": 100.0, "for_s": 20.0, "what": "kill"}
    played = told({**at, "who": "*"}, {**at, "who": "learner"}, {**at, "who": "coordinator"})
    assert len(killed(played)) == 5
    assert played.outcome.steps == 8


@pytest.mark.parametrize("who", ["learner", "coordinator", "card-1"])
def test_killing_who_is_dead_already_changes_nothing(who: str) -> None:
    first = {"what": "kill", "who": who, "at_s": 50.0, "for_s": 30.0}
    again = {**first, "at_s": 60.0, "for_s": 40.0}
    played = told(first, again)
    assert killed(played) == [(who, 50.0)]
    assert played.missed == [f"events.1 (kill {who}) befell nobody: none of them was there then"]


def test_who_crashes_by_itself_as_well_is_begun_once() -> None:
    workers = [{"name": "card", "count": 3, "crashes_per_h": 200.0, "restart_s": 10.0, "group_s": 5.0}]
    kills = [{"what": "kill", "at_s": at, "for_s": 15.0} for at in (20.0, 33.0, 41.0, 57.0, 80.0, 100.0)]
    played = told(*kills, workers=workers)
    assert kinds(played, "crashed")
    assert played.outcome.steps == 8


def test_a_preempted_machine_never_comes_back() -> None:
    at = {"who": "card-1", "at_s": 50.0}
    played = told({"what": "preempt", **at}, {"what": "kill", **at, "for_s": 5.0})
    assert len(joined(played, "card-1")) == 1
    assert played.outcome.steps == 8


def test_a_rented_machine_that_was_taken_away_is_replaced() -> None:
    played = told({"what": "preempt", "who": "rented-*", "most": 1, "at_step": 8}, **RENTED)
    (name, at_s), *_ = killed(played)
    assert name.startswith("rented-")
    assert [event for event in kinds(played, "provisioning_activate") if event["at_s"] > at_s]
    assert not [at for at in joined(played, name) if at > at_s]


def test_a_new_price_is_paid_for_what_is_rented_from_then_on() -> None:
    cheap = told(**RENTED)
    dear = told({"what": "price", "who": "rented", "at_s": 1.0, "usd_per_h": 50.0}, **RENTED)
    assert dear.outcome.cost_usd > 10 * cheap.outcome.cost_usd


def test_a_slow_learner_is_slow_for_so_long() -> None:
    plain = told()
    slow = told({"what": "slow", "who": "learner", "at_step": 2, "factor": 3.0, "for_s": 100.0})
    took = [line.t_train_s for line in slow.run.metrics]
    assert max(took) > 2 * 30.0
    assert took[-1] == pytest.approx(plain.run.metrics[-1].t_train_s), "and no longer"


def test_a_cut_line_comes_back() -> None:
    played = told({"what": "cut", "who": "card-*", "at_s": 60.0, "for_s": 45.0})
    lost = [event["at_s"] for event in kinds(played, "coordinator_unreachable")]
    assert lost
    assert not [at for at in lost if at > 105.0 + 40.0]
    assert played.outcome.steps == 8


def test_a_cut_learner_trains_on_when_its_line_is_back() -> None:
    played = told({"what": "cut", "who": "learner", "at_s": 60.0, "for_s": 45.0})
    assert played.outcome.steps == 8


def test_events_that_came_to_nothing_are_told() -> None:
    played = told(
        {"what": "kill", "who": "card-*", "at_s": 1e6, "for_s": 1.0},
        {"what": "kill", "who": "card-3", "at_s": 10.0, "for_s": 1.0},
        {"what": "preempt", "who": "card-1", "at_step": 30},
        workers=[{"name": "card", "count": 3, "arrives_s": 0.0, "arrives_every_s": 20.0}],
    )
    assert played.missed == [
        "events.0 (kill card-* at 1e+06 s) did not happen: the run was over",
        "events.1 (kill card-3) befell nobody: none of them was there then",
        "events.2 (preempt card-1 after step 30) did not happen: the run was over",
    ]
    assert told().missed == []


def test_a_worker_that_is_dead_is_leased_nothing() -> None:
    """What its last life asked for went with its connection."""
    kills = [{"what": "kill", "who": "*", "at_s": 20.0 + 25.0 * k, "for_s": 5.0} for k in range(8)]
    played = told(*kills, run={"mode": "sync"})
    alive: dict[str, bool] = {}
    for event in played.run.events:
        if event["kind"] == "killed":
            alive[event["program"]] = False
        elif event["kind"] == "joined":
            alive[event["who"]] = True
        elif event["kind"] == "lease":
            assert alive[event["worker"]], event
    assert kinds(played, "lease_lost")
