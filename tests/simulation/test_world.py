"""The production coordinator, learner and workers in virtual time."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from random import Random
from typing import Any

import pytest
from blake3 import blake3

from echo2.config.load import build_config
from echo2.config.root import Config
from echo2.coordinator.program import Coordinator
from echo2.errors import SetAside, Starved
from echo2.simulation.clock import Skew
from echo2.simulation.coin import NAME
from echo2.simulation.links import LinkModel
from echo2.simulation.loop import Deadlock
from echo2.simulation.models import LearnerModel
from echo2.simulation.world import COORDINATOR, LEARNER, SimulatedRun, WorkerModel, World, WorldModel, simulate

THREE = [WorkerModel("near"), WorkerModel("far", LinkModel(latency_s=0.15)), WorkerModel("slow", group_s=12.0)]


def config(**sections: Any) -> Config:
    tables: dict[str, Any] = {
        "run": {"steps": 8},
        "rollout": {"engine": "scripted", "rollouts_per_step": 16, "group_size": 4},
        "coordinator": {"stall_s": 300.0, "dead_after_s": 30.0},
    }
    for name, keys in sections.items():
        tables[name] = {**tables.get(name, {}), **keys}
    return build_config(tables, check_places=False)


def check_invariants(run: SimulatedRun, made: Config) -> None:
    """I1 and I3 in every metrics line, and one line per step."""
    for line in run.metrics:
        assert line.staleness_max <= made.staleness_budget
        assert line.generated == line.trained + line.expired + line.refused + line.buffered + line.failed
    for before, after in zip(run.metrics, run.metrics[1:], strict=False):
        assert (before.generated, before.trained, before.expired) <= (after.generated, after.trained, after.expired)
    assert [line.step for line in run.metrics] == list(range(made.run.steps))


def test_coordinator_learner_and_three_workers_repeat_to_the_event() -> None:
    made = config()
    first, second = simulate(made, THREE, seed=1), simulate(made, THREE, seed=1)
    assert first.events == second.events
    assert first.weights == second.weights
    check_invariants(first, made)
    assert simulate(made, THREE, seed=2).events != first.events


def batches(run: SimulatedRun) -> dict[int, set[str]]:
    """Digests under which each batch was formed."""
    formed: dict[int, set[str]] = {}
    for event in run.events:
        if event["kind"] == "batch":
            formed.setdefault(event["step"], set()).add(event["digest"])
    return formed


def trained_on(run: SimulatedRun) -> str:
    """The learner's weights as they must be after the formed batches, in order (see ModelledLearner)."""
    weights = "initial"
    for step in range(len(batches(run))):
        (digest,) = batches(run)[step]
        weights = blake3(f"{weights}/{digest}".encode()).hexdigest()
    return weights


def kinds(run: SimulatedRun, kind: str, who: str | None = None) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] == kind and who in (None, event["who"])]


async def kill_and_restart(world: World, name: str, at_s: float, away_s: float) -> None:
    await asyncio.sleep(at_s - asyncio.get_running_loop().time())
    await world.kill(name)
    await asyncio.sleep(away_s)
    world.start(name)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_baselines_run_by_configuration(mode: str) -> None:
    made = config(run={"steps": 4, "mode": mode})
    run = simulate(made, THREE)
    check_invariants(run, made)
    assert max(line.staleness_max for line in run.metrics) <= {"sync": 0, "async": 1}[mode]


def test_a_killed_learner_replays_the_same_batches_and_ends_in_the_same_weights() -> None:
    """Field reports D04 and D05: the counter goes on, nothing is trained twice, workers keep their versions."""
    made = config()

    async def scenario(world: World) -> None:
        await kill_and_restart(world, LEARNER, 45, 20)
        await kill_and_restart(world, LEARNER, 91, 3)

    run = simulate(made, THREE, scenario=scenario)
    check_invariants(run, made)
    assert all(len(digests) == 1 for digests in batches(run).values())
    assert run.weights == trained_on(run)
    attached = [event["step"] for event in kinds(run, "attached", LEARNER)]
    assert len(attached) == 3
    assert attached == sorted(attached)
    published = [event["policy"] for event in kinds(run, "published", COORDINATOR)]
    assert sorted(set(published), key=lambda policy: float(policy)) == list(dict.fromkeys(published))


def test_a_killed_coordinator_forgets_nothing_it_acknowledged() -> None:
    made = config()

    async def scenario(world: World) -> None:
        await kill_and_restart(world, COORDINATOR, 37, 6)
        await kill_and_restart(world, COORDINATOR, 80, 15)

    run = simulate(made, THREE, scenario=scenario)
    check_invariants(run, made)
    assert run.weights == trained_on(run)
    assert kinds(run, "coordinator_unreachable")


def test_a_killed_worker_delivers_from_its_spool_what_it_had_finished() -> None:
    made = config()

    async def scenario(world: World) -> None:
        await asyncio.sleep(25)
        world.links["near"].cut = True  # its next group is finished and cannot be sent
        await asyncio.sleep(10)
        assert len(await world.spools["near"].pending()) == 1
        await world.kill("near")
        await asyncio.sleep(2)
        world.start("near")

    run = simulate(made, THREE, scenario=scenario)
    check_invariants(run, made)
    again = [event for event in kinds(run, "joined", "near") if event["held"] == 1]
    assert len(again) == 1
    delivered = next(e for e in kinds(run, "submitted", "near") if e["at_s"] > again[0]["at_s"])
    assert delivered["verdicts"] == "4 accepted"


def test_a_late_result_of_a_lease_given_to_another_is_a_duplicate_and_harms_nothing() -> None:
    """Field report D08: W1 vanishes, W2 does its work, W1 comes back with the same group."""
    made = config(run={"steps": 10})

    async def scenario(world: World) -> None:
        await asyncio.sleep(25)
        world.links["near"].cut = True
        await asyncio.sleep(made.coordinator.dead_after_s + 40)
        world.links["near"].cut = False

    run = simulate(made, THREE, scenario=scenario)
    check_invariants(run, made)
    assert kinds(run, "worker_silent")
    late = [event["verdicts"] for event in kinds(run, "submitted", "near") if "accepted" not in event["verdicts"]]
    assert late
    assert set(late[0].split(", ")) <= {"4 duplicate", "4 unattributed", "4 stale"}
    assert run.weights == trained_on(run)


def test_lost_replies_are_retried_to_the_same_verdict() -> None:
    made = config(run={"steps": 4})
    lossy = [WorkerModel(name, LinkModel(loss=0.15)) for name in ("a", "b", "c")]
    run = simulate(made, lossy, seed=3)
    check_invariants(run, made)
    assert kinds(run, "coordinator_unreachable")
    granted = {event["lease"] for event in kinds(run, "lease")}
    assert len(granted) == len(kinds(run, "lease"))


def test_a_restarted_worker_is_leased_nothing_before_it_has_weights_fresh_enough() -> None:
    """Field report E11."""
    made = config()

    async def scenario(world: World) -> None:
        await kill_and_restart(world, "near", 70, 1)

    run = simulate(made, THREE, scenario=scenario)
    killed = kinds(run, "killed")[0]["at_s"]
    installed = next(e for e in kinds(run, "installed", "near") if e["at_s"] > killed)
    first = next(e for e in kinds(run, "lease") if e["worker"] == "near" and e["at_s"] > killed)
    assert first["at_s"] > installed["at_s"]
    step = max(event["step"] for event in kinds(run, "batch") if event["at_s"] <= first["at_s"])
    assert int(first["policy"].split(".")[1]) >= step + 1 - made.staleness_budget


def test_without_workers_the_run_ends_and_says_so() -> None:
    """Field report D07."""

    async def scenario(world: World) -> None:
        await asyncio.sleep(30)
        for name in ("near", "far", "slow"):
            await world.kill(name)

    with pytest.raises(Starved, match=r"no trajectory was accepted for 30\d s while the learner waits.*no worker is"):
        simulate(config(), THREE, scenario=scenario, until_s=3000)


def shut_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease gate that never opens again: nobody generates, the learner waits, everybody polls politely for ever."""
    monkeypatch.setattr("echo2.coordinator.worker_desk.closed_because", lambda inputs, version: "the gate is shut")


def test_a_run_that_is_stuck_is_ended_by_its_own_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    shut_the_gate(monkeypatch)
    with pytest.raises(Starved, match=r"no trajectory was accepted .* while the learner waits.*3 workers are alive"):
        simulate(config(), THREE, until_s=3000)


def test_a_deadlock_in_the_programs_is_reported_with_who_waits_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """…and where the watchdog sleeps, too, the loop itself tells."""
    shut_the_gate(monkeypatch)
    monkeypatch.setattr("echo2.coordinator.program.starved", lambda progress, stall_s: None)
    with pytest.raises(Deadlock, match="had to end by 2000 s and still waits") as caught:
        simulate(config(), THREE, until_s=2000)
    told = str(caught.value)
    assert "learner waits in" in told
    assert "lane 0 waits in" in told
    assert "handle RequestLease of near waits in WorkerAnswers._queued" in told
    assert "on: return await waiter" in told


def test_wrong_wall_clocks_change_nothing() -> None:
    """Field report H12: leases and staleness depend on no machine's wall clock."""
    made = config(run={"steps": 4})
    # Ten minutes ahead, ten behind, a jump back of a minute during a lease; at home a jump of an hour in mid-run.
    skews: dict[str, Skew] = {"near": 600.0, "far": -600.0, "slow": lambda now_s: -60.0 * (now_s > 17.0)}
    skewed = [WorkerModel(w.name, w.link, w.group_s, clock_skew_s=skews[w.name]) for w in THREE]
    home = WorldModel(home_skew_s=lambda now_s: 3600.0 * (now_s > 30.0))
    wrong, right = simulate(made, skewed, model=home), simulate(made, THREE)
    assert wrong.events == right.events
    assert wrong.metrics[-1].wall_time - right.metrics[-1].wall_time == pytest.approx(3600.0), "the clock was wrong"


def test_a_busy_learner_and_a_short_silence_cost_nobody_a_lease() -> None:
    """Field report H05: honest work is not taken for death."""
    made = config(run={"steps": 3})

    async def scenario(world: World) -> None:
        await asyncio.sleep(20)
        world.links["slow"].cut = True
        await asyncio.sleep(made.coordinator.dead_after_s / 2)
        world.links["slow"].cut = False

    busy = WorldModel(learner=LearnerModel(train_s=200.0))
    run = simulate(made, THREE, model=busy, scenario=scenario)
    check_invariants(run, made)
    assert not kinds(run, "worker_silent")
    assert not kinds(run, "lease_lost")


def test_a_drained_worker_submits_what_it_holds_and_leaves() -> None:
    made = config()

    async def scenario(world: World) -> None:
        await asyncio.sleep(40)
        world.drain("slow")

    run = simulate(made, THREE, scenario=scenario)
    check_invariants(run, made)
    left = kinds(run, "left", "slow")[0]["at_s"]
    assert 40 < left < 60
    assert not [event for event in kinds(run, "lease") if event["worker"] == "slow" and event["at_s"] > 40]
    assert not kinds(run, "lease_lost")


def test_an_orphaned_worker_shuts_itself_down_with_a_sentence() -> None:
    made = config(run={"steps": 4}, workers={"orphan_after_s": 60.0})

    async def scenario(world: World) -> None:
        await asyncio.sleep(20)
        world.links["near"].cut = True

    run = simulate(made, THREE, scenario=scenario)
    failed = [event for event in kinds(run, "program_failed") if event["program"] == "near"]
    assert "Starved: the coordinator must answer within 60 s" in failed[0]["error"]


def test_checkpoints_dearer_than_publishes_fork_after_a_crash() -> None:
    made = config(run={"steps": 12}, checkpoint={"every_publishes": 2})

    async def scenario(world: World) -> None:
        while not [e for e in world.events.kinds("published", COORDINATOR) if e["policy"] == "0.2"]:
            await asyncio.sleep(0.5)
        await kill_and_restart(world, LEARNER, asyncio.get_running_loop().time() + 8, 5)

    run = simulate(made, THREE, scenario=scenario)
    assert len(kinds(run, "rollback")) == 1
    last = {line.step: line for line in run.metrics}
    assert sorted(last) == list(range(12))
    assert last[11].policy_incarnation == 1
    assert last[11].generated == sum(
        getattr(last[11], s) for s in ("trained", "expired", "refused", "buffered", "failed")
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_deaths_never_hang_a_run_nor_break_its_books(seed: int) -> None:
    """Field report D10 at the level of programs: whoever dies whenever, the run ends and I1 and I3 hold."""
    made = config(run={"steps": 6})
    random = Random(seed)
    names = [COORDINATOR, LEARNER, "near", "far", "slow"]
    deaths = sorted((random.uniform(1, 120), random.choice(names), random.uniform(0.1, 45)) for _ in range(8))

    async def scenario(world: World) -> None:
        for at_s, name, away_s in deaths:
            await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))
            await world.kill(name)
            await asyncio.sleep(away_s)
            world.start(name)

    run = simulate(made, THREE, seed=seed, scenario=scenario, until_s=5000)
    check_invariants(run, made)
    assert run.weights == trained_on(run)


def test_the_event_log_does_not_depend_on_the_order_of_hashes() -> None:
    """I10 between processes: strings hash differently in each of them."""
    code = (
        "import sys, runpy; space = runpy.run_path(sys.argv[1]); "
        "run = space['simulate'](space['config'](run={'steps': 3}), space['THREE'], seed=5); "
        "print(hash('a'), space['blake3'](repr(run.events).encode()).hexdigest())"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, __file__], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    their_hash, their_log = done.stdout.split()
    assert int(their_hash) != hash("a")
    assert their_log == blake3(repr(simulate(config(run={"steps": 3}), THREE, seed=5).events).encode()).hexdigest()


def test_held_out_prompts_are_scored_under_each_due_version_and_the_last_one_too() -> None:
    made = config(eval={"every_steps": 4, "prompts": 6, "samples": 2})
    run = simulate(made, [WorkerModel("a"), WorkerModel("b")], seed=3)
    check_invariants(run, made)
    scored = [(event["version"], event["prompts"]) for event in run.events if event["kind"] == "evaluated"]
    assert scored == [(4, 6), (8, 6)]
    last = run.metrics[-1]
    assert last.generated == last.trained, "replies of an evaluation are no rows"


def test_each_task_of_a_mixture_has_its_own_numbers() -> None:
    tables = {
        "run": {"steps": 6},
        "rollout": {"engine": "scripted", "rollouts_per_step": 16, "group_size": 4},
        "eval": {"every_steps": 3, "prompts": 8},
        "tasks": [
            {"name": "arithmetic", "label": "small", "options": {"max_operand": 3}, "weight": 3.0},
            {"name": "arithmetic", "label": "large", "options": {"min_operand": 50, "max_operand": 99}},
        ],
    }
    made = build_config(tables, check_places=False)
    evals: list[bytes] = []

    async def scenario(world: World) -> None:
        evals.append(b"")
        while True:
            await asyncio.sleep(1.0)
            evals[:] = world.lines.evals

    run = simulate(made, THREE, scenario=scenario)
    assert json.loads(evals[-1])["reward_by_task"].keys() == {"small", "large"}
    check_invariants(run, made)
    rows: dict[str, int] = {}
    for line in run.metrics:
        assert set(line.rows_by_task) <= {"small", "large"}
        assert line.rows_by_task.keys() == line.reward_by_task.keys() == line.pass_share_by_task.keys()
        assert line.pass_share_by_task == line.reward_by_task, "rewards of this task are 0 and 1"
        total = sum(line.rows_by_task.values())
        mean = sum(line.reward_by_task[task] * count for task, count in line.rows_by_task.items()) / total
        assert line.reward_mean == pytest.approx(mean)
        for task, count in line.rows_by_task.items():
            rows[task] = rows.get(task, 0) + count
    assert 1.5 < rows["small"] / rows["large"] < 6.0


def test_rewards_are_scored_again_and_nobody_honest_is_set_aside() -> None:
    run = simulate(config(coordinator={"rescored_share": 0.5}), THREE)
    last = run.metrics[-1]
    assert last.rescored > 0.3 * last.generated
    assert (last.rescored_differing, last.rescoring_failed, last.set_aside) == (0, 0, {})
    without = simulate(config(coordinator={"rescored_share": 0.0}), THREE)
    assert without.metrics[-1].rescored == 0
    # Only the disk is shared: answers wait for what was written before, some milliseconds.
    assert last.elapsed_s == pytest.approx(without.metrics[-1].elapsed_s, abs=1.0), "nobody waits for it"
    assert (last.trained, last.idle_s) == pytest.approx(
        (without.metrics[-1].trained, without.metrics[-1].idle_s), abs=0.1
    )


def test_a_worker_that_is_set_aside_ends_and_the_others_carry_the_run_also_after_a_restart() -> None:
    made = config()

    async def scenario(world: World) -> None:
        await asyncio.sleep(30)
        coordinator = world.programs[COORDINATOR]
        assert isinstance(coordinator, Coordinator)
        await coordinator.hall.set_aside("near", "somebody found out")
        await kill_and_restart(world, COORDINATOR, 45, 5)
        with pytest.raises(SetAside, match="no more work of worker near: somebody found out"):
            raise world.faults["near"]
        world.start("near")
        await asyncio.sleep(10)
        assert isinstance(world.faults["near"], SetAside)

    run = simulate(made, THREE, scenario=scenario)
    check_invariants(run, made)
    assert run.metrics[-1].set_aside == {"near": "near: somebody found out"}
    late = [event for event in kinds(run, "submit", COORDINATOR) if event["at_s"] > 30]
    assert {event["worker"] for event in late} == {"far", "slow"}


def test_a_restarted_coordinator_plans_with_the_times_measured_before_it() -> None:
    made = config(run={"steps": 6})
    run = simulate(made, THREE, scenario=lambda world: kill_and_restart(world, "coordinator", 55.0, 3.0))
    check_invariants(run, made)
    measured = [line.t_bcast_s for line in run.metrics]
    known = next(index for index, value in enumerate(measured) if value is not None)
    assert None not in measured[known:]


def test_deltas_carry_the_run_and_late_or_restarted_workers_find_their_way() -> None:
    """The first version is the one whole snapshot on the wire; a newcomer walks from it over the deltas."""
    made = config(run={"steps": 12})

    async def scenario(world: World) -> None:
        await world.kill("near")  # before it had anything
        await asyncio.sleep(60)
        world.start("near")
        await kill_and_restart(world, "far", 75, 5)

    run = simulate(made, THREE, scenario=scenario)
    check_invariants(run, made)
    assert [event["sent_as"] for event in kinds(run, "published", COORDINATOR)] == ["anchor"] + ["delta"] * 6
    last = run.metrics[-1]
    assert last.snapshot_bytes > 100e6 > 2e6 == last.publish_bytes
    assert last.delta_share == pytest.approx(5 / 6)
    near = [event["policy"] for event in kinds(run, "installed", "near")]
    assert "0.0" not in near, "stepping stones are not run"
    again = [int(e["policy"].split(".")[1]) for e in kinds(run, "installed", "far") if e["at_s"] > 80]
    assert again == sorted(again)
    assert again[-1] == 12


def test_a_restarted_worker_runs_what_lies_verified_on_its_disk() -> None:
    made = config(run={"steps": 8})
    slow = WorldModel(uplink_bytes_per_s=1e6)  # a whole snapshot takes 100 s

    async def scenario(world: World) -> None:
        while len(world.events.kinds("installed", "near")) < 2:
            await asyncio.sleep(1)
        await kill_and_restart(world, "near", asyncio.get_running_loop().time(), 1)

    run = simulate(made, THREE, model=slow, scenario=scenario)
    check_invariants(run, made)
    killed = kinds(run, "killed")[0]["at_s"]
    first = next(event["at_s"] for event in kinds(run, "installed", "near") if event["at_s"] > killed)
    assert first - killed < 15


def test_a_line_slower_than_the_learner_publishes_still_gets_every_version_it_set_out_for() -> None:
    """PROTOCOL §5: deltas queue. Going for the newest only, it would never arrive anywhere."""
    made = config(run={"steps": 14})
    slow = [WorkerModel("near"), WorkerModel("far"), WorkerModel("dsl", LinkModel(bytes_per_s=1.0e6))]
    run = simulate(made, slow, model=WorldModel(delta_bytes=40e6))
    check_invariants(run, made)
    period = [event["at_s"] for event in kinds(run, "published", COORDINATOR)]
    assert period[3] - period[2] < 40, "a delta takes longer than the time between two publishes"
    installed = [event["policy"] for event in kinds(run, "installed", "dsl")]
    assert len(installed) >= 2, installed


def test_groups_that_take_several_steps_do_not_close_the_gate_on_themselves() -> None:
    """Equation (12) leaves the time to finish a group out; the gate must not, or the learner runs dry."""
    tables: dict[str, Any] = {
        "run": {"steps": 40},
        "tasks": [{"name": NAME}],
        "rollout": {
            "engine": "scripted", "rollouts_per_step": 16, "group_size": 4, "episode_timeout_s": 3600.0,
        },
        "staleness": {"budget": 11, "publish_period": 3},
        "coordinator": {"stall_s": 3000.0},
    }  # fmt: skip
    model = WorldModel(learner=LearnerModel(train_s=100.0), uplink_bytes_per_s=1e8, delta_bytes=4e6)
    fleet = [WorkerModel(f"w{number}", group_s=700.0, spread=0.1) for number in range(48)]
    run = simulate(build_config(tables, check_places=False), fleet, seed=1, model=model)
    settled = run.metrics[14:-2]
    assert all(line.staleness_max <= 11 for line in run.metrics)
    assert sum(line.idle_s for line in settled) < 0.02 * sum(line.idle_s + line.t_train_s for line in settled)
