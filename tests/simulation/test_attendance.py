"""Keeping heartbeats back changes nothing that happens (PROTOCOL §7): the same runs with every beat played."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from echo2.config.load import build_config
from echo2.config.root import Config
from echo2.simulation.links import LinkModel
from echo2.simulation.loop import run_virtual
from echo2.simulation.models import LearnerModel, WorkerModel, WorldModel
from echo2.simulation.world import COORDINATOR, Scenario, SimulatedRun, World, simulate

KEPT_BACK = WorldModel(learner=LearnerModel(train_s=20.0), delta_bytes=4e6)
PLAYED = msgspec.structs.replace(KEPT_BACK, plays_heartbeats=True)
FEW = [WorkerModel(f"w{k}", LinkModel(latency_s=0.01 + 0.02 * k), group_s=9.0) for k in range(6)]
HEARTBEAT_S = 2.0
TOLERANCE_S = 0.1
"""A few commits and trips: a beat's commit may carry another's answer, and so an answer comes a moment sooner."""
POLL_TOLERANCE_S = 0.6
"""News that come between two polls wait for the next one."""


def config(**sections: Any) -> Config:
    tables: dict[str, Any] = {
        "run": {"steps": 12},
        "rollout": {"engine": "scripted", "rollouts_per_step": 32, "group_size": 4},
        "coordinator": {"stall_s": 300.0, "dead_after_s": 30.0, "heartbeat_s": HEARTBEAT_S},
    }
    return build_config(tables | sections, check_places=False)


def both(scenario: Scenario | None = None, seed: int = 0, fleet: list[WorkerModel] = FEW, **sections: Any) -> Any:
    made = config(**sections)
    return tuple(
        simulate(made, fleet, seed=seed, model=model, scenario=scenario, until_s=20_000)
        for model in (KEPT_BACK, PLAYED)
    )


def happened(run: SimulatedRun, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] in kinds]


def in_the_run(run: SimulatedRun, kind: str) -> list[dict[str, Any]]:
    """Until the last step; who is told first that the run ends depends on whose beat is next."""
    (end,) = (event["at_s"] for event in happened(run, "step") if event["step"] == 11)
    return [event for event in happened(run, kind) if event["at_s"] < end]


def verdicts(run: SimulatedRun) -> dict[str, int]:
    last = run.metrics[-1]
    counts = {name: getattr(last, name) for name in ("generated", "trained", "expired", "refused", "failed")}
    return counts | last.refused_by


@pytest.mark.parametrize("seed", range(3))
def test_undisturbed_runs_are_equal_to_the_batch_the_version_and_the_moment(seed: int) -> None:
    quiet, played = both(seed=seed)
    assert quiet.weights == played.weights, "the same batches in the same order"
    assert verdicts(quiet)["trained"] == verdicts(played)["trained"]
    for kind in ("batch", "published", "step", "disseminated"):
        ours, theirs = in_the_run(quiet, kind), in_the_run(played, kind)
        assert [{**event, "at_s": 0, "t_bcast_s": 0} for event in ours] == [
            {**event, "at_s": 0, "t_bcast_s": 0} for event in theirs
        ]
        tolerance_s = POLL_TOLERANCE_S if kind == "disseminated" else TOLERANCE_S
        assert [e["at_s"] for e in ours] == pytest.approx([e["at_s"] for e in theirs], abs=tolerance_s, rel=0)
    installs = [
        {(e["who"], e["policy"]): e["at_s"] for e in in_the_run(run, "installed") if e["who"] != COORDINATOR}
        for run in (quiet, played)
    ]
    assert installs[0] == pytest.approx(installs[1], abs=POLL_TOLERANCE_S, rel=0)


def test_a_silent_worker_is_noticed_within_a_heartbeat_of_when_it_would_have_been() -> None:
    async def cut(world: World) -> None:
        await asyncio.sleep(77.7)
        world.links["w2"].cut = True
        await asyncio.sleep(90.0)
        world.links["w2"].cut = False

    quiet, played = both(cut)
    (ours,), (theirs,) = happened(quiet, "worker_silent"), happened(played, "worker_silent")
    assert ours["at_s"] == pytest.approx(theirs["at_s"], abs=2 * HEARTBEAT_S)
    assert ours["silent_s"] == pytest.approx(theirs["silent_s"], abs=2 * HEARTBEAT_S)
    assert [(e["lease"], e["worker"]) for e in happened(quiet, "lease_lost")] == [
        (e["lease"], e["worker"]) for e in happened(played, "lease_lost")
    ]
    assert len(happened(quiet, "worker_joined")) == len(happened(played, "worker_joined")) == len(FEW) + 1
    assert verdicts(quiet)["trained"] == verdicts(played)["trained"]


def test_a_coordinator_that_dies_is_missed_and_found_again_by_everybody() -> None:
    async def restart(world: World) -> None:
        await asyncio.sleep(90)
        await world.kill(COORDINATOR)
        await asyncio.sleep(10)
        world.start(COORDINATOR)

    quiet, played = both(restart)
    for run in (quiet, played):
        assert {event["who"] for event in happened(run, "heartbeat_lost")} >= {worker.name for worker in FEW}
        assert len(happened(run, "worker_joined")) == len(happened(played, "worker_joined"))
        assert run.metrics[-1].step == 11


def test_lost_messages_are_lost_in_both_and_no_lease_is_forgotten() -> None:
    lossy = [msgspec.structs.replace(worker, link=LinkModel(loss=0.03)) for worker in FEW]
    runs = [both(seed=seed, fleet=lossy) for seed in range(3)]
    quiet, played = ([len(happened(pair[which], "heartbeat_lost")) for pair in runs] for which in (0, 1))
    assert sum(quiet) == pytest.approx(sum(played), rel=0.5)
    assert sum(quiet) > 20
    for pair in runs:
        assert [run.metrics[-1].trained for run in pair] == [12 * 32] * 2


def test_a_worker_that_is_cut_off_for_long_shuts_itself_down_at_the_same_time() -> None:
    """The last answer that it heard is one that was kept back."""

    async def cut(world: World) -> None:
        await asyncio.sleep(100)
        world.links["w0"].cut = True

    quiet, played = both(cut, run={"steps": 20}, workers={"orphan_after_s": 60.0})
    (ours,), (theirs,) = happened(quiet, "program_failed"), happened(played, "program_failed")
    assert ours["at_s"] == pytest.approx(theirs["at_s"], abs=3 * HEARTBEAT_S)


def test_a_beat_that_changes_nothing_costs_nothing() -> None:
    """Callbacks of the loop, for workers that generate for an hour."""

    async def calls(model: WorldModel, group_s: float) -> int:
        made = config(run={"steps": 1}, coordinator={"stall_s": 1e6, "dead_after_s": 30.0})
        world = World(made, model, [msgspec.structs.replace(FEW[0], group_s=group_s)], 0)
        await world.run(None)
        return asyncio.get_running_loop().callbacks  # type: ignore[attr-defined]

    short, long = (run_virtual(calls(KEPT_BACK, group_s)) for group_s in (10.0, 400.0))
    ticks = 8 * (400.0 - 10.0) / HEARTBEAT_S
    assert long - short < 10 * ticks, "the coordinator's own watch alone goes on"
    assert run_virtual(calls(PLAYED, 400.0)) > 2 * long
