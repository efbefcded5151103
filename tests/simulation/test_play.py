"""Scenarios played to their end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from scenarios import DISTURBED, scenario

from echo2.errors import Starved
from echo2.simulation.loop import Deadlock, Overdue
from echo2.simulation.play import Played, play
from echo2.simulation.world import World


@pytest.fixture(scope="module")
def disturbed() -> Played:
    return play(scenario(base=DISTURBED))


def kinds(played: Played, kind: str) -> list[dict[str, Any]]:
    return [event for event in played.run.events if event["kind"] == kind]


def test_i10_the_same_seed_plays_the_same_run_whatever_happens_in_it(disturbed: Played) -> None:
    """I10: churn, preemption, slow spells, prices, kills of coordinator and learner."""
    assert {event["program"] for event in kinds(disturbed, "killed")} >= {"coordinator", "learner"}
    for kind in ("preempted", "crashed", "cut_off", "slowed", "provisioning_activate", "worker_silent"):
        assert kinds(disturbed, kind), kind
    again = play(scenario(base=DISTURBED))
    assert again.run.events == disturbed.run.events
    assert again.run.metrics == disturbed.run.metrics
    assert again.outcome == disturbed.outcome


def test_i10_another_seed_plays_another_run(disturbed: Played) -> None:
    other = play(scenario("world.seed=1", base=DISTURBED))
    assert other.run.events != disturbed.run.events
    assert other.outcome.steps == disturbed.outcome.steps == 20


def test_every_step_is_told_as_it_is_trained() -> None:
    told: list[int] = []
    played = play(scenario(), on_step=lambda line: told.append(line.step))
    assert told == list(range(8)) == [line.step for line in played.run.metrics]


@pytest.mark.parametrize(("mode", "budget"), [("sync", 0), ("async", 1), ("echo2", 4)])
def test_the_baselines_are_a_change_of_one_key(mode: str, budget: int) -> None:
    found = play(scenario(f"run.mode={mode}")).outcome
    assert found.staleness is not None
    assert found.staleness.max <= budget
    assert found.steps == 8


@pytest.mark.parametrize("relays", ["planned", "nodes", "none"])
def test_snapshots_come_whichever_way_they_are_sent(relays: str) -> None:
    found = play(scenario(f"world.relays={relays}")).outcome
    assert found.t_bcast_s is not None
    assert found.t_bcast_s.p50 > 1.5, "checkpoint and snapshot are part of it"


def test_engines_that_pause_while_a_snapshot_travels_cost_time() -> None:
    slow: dict[str, Any] = {"rehearsal": {"snapshot_bytes": 200_000_000}, "world": {"delta_share": 1.0}}
    goes_on, pauses = (  # one worker, which is the bottleneck
        play(scenario(f"world.generation={how}", "workers.0.count=1", **slow)).outcome.virtual_s
        for how in ("continues", "pauses")
    )
    assert pauses > goes_on


def test_a_budget_ends_the_run_and_the_outcome_says_so() -> None:
    found = play(scenario("provisioning.budget_usd=0.05", "provisioning.learner_usd_per_h=2.0")).outcome
    assert found.steps < 8
    assert "the budget of 0.05 USD is spent" in found.stopped


def test_a_learner_that_is_rolled_back_counts_its_steps_once() -> None:
    """Checkpoints dearer than publishes fork after a crash."""
    kill = [{"what": "kill", "who": "learner", "at_s": 170.0, "for_s": 5.0}]
    played = play(scenario("checkpoint.every_publishes=3", "run.steps=10", events=kill))
    assert kinds(played, "rollback")
    assert len(played.run.metrics) > played.outcome.steps == 10


def test_a_horizon_that_is_too_short_ends_with_what_to_raise() -> None:
    with pytest.raises(
        Deadlock, match=r"within world.horizon_h = 0.02 h, and 1 of 8 steps were trained by then"
    ) as told:
        play(scenario("world.horizon_h=0.02"))
    assert isinstance(told.value.__cause__, Overdue), "which lists who waits for what"
    assert "\n" not in str(told.value)


def test_a_deadlock_ends_with_a_sentence_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody_ever(world: World, *_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(World, "run", nobody_ever)
    with pytest.raises(Deadlock, match=r"nothing can happen any more.*ECHO2_DEBUG=1 lists who waits") as told:
        play(scenario())
    assert "\n" not in str(told.value)


def test_a_run_that_nobody_is_left_to_feed_ends_with_its_own_sentence() -> None:
    with pytest.raises(Starved, match=r"no trajectory was accepted .* no worker is alive"):
        play(scenario(events=[{"what": "preempt", "at_s": 40.0}]))


def test_what_is_played_is_plain_data(disturbed: Played) -> None:
    assert msgspec.json.decode(msgspec.json.encode(disturbed.outcome))["steps"] == 20
