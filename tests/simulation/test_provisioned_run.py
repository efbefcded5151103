"""A pool that is held at its target: the production coordinator, controller and workers in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from echo2.config.load import build_config
from echo2.provisioning.offers import Offer
from echo2.simulation.fates import FateModel
from echo2.simulation.models import LearnerModel, WorkerModel, WorldModel
from echo2.simulation.pool import MachineModel
from echo2.simulation.world import COORDINATOR, LEARNER, Scenario, SimulatedRun, World, simulate

Market = Mapping[str, MachineModel]
PERIOD_S = 60.0
GROUP, LANES, ROWS, T_TRAIN_S = 4, 2, 64, 60.0
MODEL = WorldModel(
    learner=LearnerModel(train_s=T_TRAIN_S, spread=0.02, checkpoint_s=1.0, snapshot_s=0.1, snapshot_bytes=1e6),
    delta_bytes=1e5,
)


def machine(name: str, usd_per_h: float, group_s: float, count: int = 8) -> MachineModel:
    """One that delivers LANES·GROUP/group_s trajectories per second."""
    rate = LANES * GROUP / group_s
    return MachineModel(
        Offer(name=name, gpu="modelled", count=count, usd_per_h=usd_per_h, rollouts_per_s=rate), group_s
    )


MARKET = {"slow": machine("slow", 0.30, 40.0), "fast": machine("fast", 0.50, 20.0)}
"""0.2/s at 1.5 USD/h per trajectory/s, and 0.4/s at 1.25."""


def tables(steps: int, **provisioning: Any) -> dict[str, Any]:
    return {
        "run": {"steps": steps},
        "rollout": {
            "engine": "scripted", "rollouts_per_step": ROWS, "group_size": GROUP, "concurrent_groups": LANES,
        },
        "staleness": {"budget": 6, "publish_period": 2},
        "coordinator": {"dead_after_s": 60.0},
        "provisioning": {"period_s": PERIOD_S, "learner_usd_per_h": 2.0, **provisioning},
    }  # fmt: skip


def run_with(
    steps: int, scenario: Scenario | None = None, market: Market = MARKET, **provisioning: Any
) -> SimulatedRun:
    config = build_config(tables(steps, **provisioning), check_places=False)
    return simulate(config, [], model=MODEL, machines=market, scenario=scenario)


def events(run: SimulatedRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] == kind]


def waited(run: SimulatedRun, first: int, last: int | None = None) -> float:
    """Bubble ratio of these steps."""
    lines = run.metrics[first:last]
    return sum(line.idle_s for line in lines) / sum(line.idle_s + line.t_train_s for line in lines)


async def after_step(world: World, step: int) -> None:
    while len(world.lines.metrics) < step:
        await asyncio.sleep(1.0)


def test_the_pool_grows_to_its_target_and_then_the_learner_does_not_wait() -> None:
    run = run_with(60)
    assert waited(run, 30) < 0.05
    assert max(line.mu_pool_per_s for line in run.metrics[30:]) < 1.5 * 1.1 * ROWS / T_TRAIN_S
    assert all(event["reason"] for event in events(run, "provisioning_activate"))


def test_the_cheaper_offer_is_taken_first() -> None:
    run = run_with(40)
    ordered = [event["offer"] for event in events(run, "provisioning_activate") for _ in range(event["machines"])]
    assert ordered[1:3] == ["fast", "fast"], "after the one that was held for profiling, the least for an hour"
    assert ordered.count("slow") <= 3, "to fill up what is less than a fast one"


def test_machines_that_were_taken_away_are_replaced_at_once_and_cost_nothing_more() -> None:
    taken: list[str] = []

    async def story(world: World) -> None:
        await after_step(world, 25)
        taken.extend(world.working()[:2])
        for name in taken:
            await world.pool.preempt(name)

    run = run_with(60, story)
    died_s = next(event["at_s"] for event in events(run, "killed"))
    again = [event for event in events(run, "provisioning_activate") if event["at_s"] >= died_s]
    assert len(taken) == 2
    assert again, "replaced"
    assert again[0]["at_s"] - died_s <= 3 * PERIOD_S
    assert "went away" in again[0]["reason"]
    assert waited(run, 45) < 0.05


def test_i05_a_machine_taken_away_during_its_set_up_is_replaced_and_the_run_goes_on() -> None:
    """A preemption, not a fault of the offer: it is ordered from again at the next look, without a back-off."""
    taken: list[str] = []

    async def story(world: World) -> None:
        while not taken:
            await asyncio.sleep(1.0)
            taken.extend(handle.machine_id for handle in await world.pool.machines())
        await world.pool.preempt(taken[0])

    run = run_with(12, story)
    first, second = events(run, "provisioning_activate")[:2]
    assert first["machine_ids"] == taken[0]
    assert second["offer"] == first["offer"]
    assert second["at_s"] - first["at_s"] <= PERIOD_S
    assert [event["machine"] for event in events(run, "machine_gone")][:1] == taken
    assert taken[0] not in {event["name"] for event in events(run, "worker_joined")}
    assert len(run.metrics) == 12


def test_workers_that_became_slow_are_made_up_for() -> None:
    async def story(world: World) -> None:
        await after_step(world, 25)
        for name in world.working()[:2]:
            world.slow(name, 4.0)

    run = run_with(90, story)
    assert waited(run, 70) < 0.05


def test_a_pool_that_is_too_large_shrinks_by_its_dearest_machines() -> None:
    """The learner needs half as much from step 25 on."""

    async def story(world: World) -> None:
        await after_step(world, 25)
        world.slow(LEARNER, 2.0)

    run = run_with(80, story)
    released = [event["machine_id"] for event in events(run, "provisioning_release")]
    assert released
    assert waited(run, 60) < 0.05
    assert run.metrics[-1].usd_per_h < run.metrics[24].usd_per_h


def test_the_budget_ends_activation_and_then_the_run_in_order() -> None:
    run = run_with(500, budget_usd=2.0)
    assert len(run.metrics) < 500
    assert events(run, "provisioning_end")
    assert run.metrics[-1].cost_usd <= 2.0
    assert events(run, "done")


def test_a_coordinator_that_was_killed_finds_its_machines_again_and_owes_what_they_cost_meanwhile() -> None:
    down_s, seen = 120.0, list[list[str]]()

    async def story(world: World) -> None:
        await after_step(world, 25)
        seen.append(world.working())
        await world.kill(COORDINATOR)
        await asyncio.sleep(down_s)
        world.start(COORDINATOR)
        await after_step(world, 30)
        seen.append(world.working())

    run, undisturbed = run_with(45, story), run_with(45)
    assert seen[0] == seen[1]
    before, after = run.metrics[24], run.metrics[25]
    assert after.cost_usd - before.cost_usd >= (before.usd_per_h - 2.0) * down_s / 3600
    assert run.metrics[-1].cost_usd < 1.2 * undisturbed.metrics[-1].cost_usd + before.usd_per_h * down_s / 3600
    assert [line.step for line in run.metrics] == list(range(45))


def test_a_restart_of_the_coordinator_moves_no_machine() -> None:
    """Workers are in the middle of their leases as it dies, and their machines stay theirs."""

    async def story(world: World) -> None:
        await after_step(world, 25)
        await world.kill(COORDINATOR)
        await asyncio.sleep(30.0)
        world.start(COORDINATOR)

    run = run_with(50, story)
    died_s = next(event["at_s"] for event in events(run, "killed"))
    assert run.ended_s > died_s + 1200.0, "longer than a start may take"
    assert [event for event in events(run, "provisioning_release") if event["at_s"] > died_s] == []
    assert [event for event in events(run, "provisioning_activate") if event["at_s"] > died_s] == []


def test_when_the_run_is_over_nothing_is_left_running() -> None:
    run = run_with(20)
    ordered = {name for event in events(run, "provisioning_activate") for name in event["machine_ids"].split(",")}
    stopped = {event["machine"] for event in events(run, "machine_stopped")}
    assert ordered == stopped


def test_volunteers_wait_until_they_are_needed_and_cost_only_then() -> None:
    given = tables(60)
    given["pools"] = [{"kind": "standby", "rollouts_per_s": 0.4}]
    given["workers"] = {"usd_per_h": 0.7}
    workers = [WorkerModel(f"v{k}", group_s=20.0) for k in range(9)]
    run = simulate(build_config(given, check_places=False), workers, model=MODEL)
    assert waited(run, 30) < 0.05
    used = {event["offer"] for event in events(run, "provisioning_activate")}
    assert 3 <= len(used) <= 5, "of nine, of which each delivers 0.4/s, for 1.17/s"
    assert run.metrics[-1].usd_per_h < 2.0 + 0.7 * 6
    leased = {event["worker"] for event in events(run, "lease")}
    assert {f"standby-{name}" for name in leased} == used


def test_i10_the_same_run_is_the_same_to_the_event() -> None:
    assert run_with(25).events == run_with(25).events


def test_a_machine_given_back_while_its_worker_restarts_stays_away() -> None:
    market = {
        name: msgspec.structs.replace(
            offered, worker=WorkerModel(name, fate=FateModel(crashes_per_h=30.0, restart_s=300.0))
        )
        for name, offered in MARKET.items()
    }
    given_back: list[str] = []

    async def give_back_whoever_restarts(world: World) -> None:
        while not given_back:
            await asyncio.sleep(5.0)
            down = [name for name in world.workers if world.pool.has(name) and name not in world.working()]
            for name in down:
                await world.pool.stop(name)
                given_back.append(name)

    run = run_with(30, give_back_whoever_restarts, market)
    assert given_back
    gone_s = max(event["at_s"] for event in events(run, "killed") if event["program"] == given_back[0])
    joined = [event["at_s"] for event in events(run, "worker_joined") if event["name"] == given_back[0]]
    assert len(joined) == 1
    assert joined[0] < gone_s
