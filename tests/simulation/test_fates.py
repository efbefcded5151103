"""Preemption, crashes, outages and slow spells, drawn from the seed; and worlds that repeat whatever the hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

from blake3 import blake3

from echo2.config.load import build_config
from echo2.simulation.coin import NAME
from echo2.simulation.engines import EngineModel, LengthModel, SlowSpells
from echo2.simulation.fates import FateModel
from echo2.simulation.links import LinkModel
from echo2.simulation.models import LearnerModel, WorkerModel, WorldModel
from echo2.simulation.world import SimulatedRun, simulate

ROUGH = FateModel(preemptions_per_h=1.0, crashes_per_h=6.0, restart_s=15.0, outages_per_h=10.0, outage_s=20.0)
ENGINE = EngineModel(
    tokens_per_s=30.0, places=4, lengths=LengthModel(200, "pareto", 0.4), spells=SlowSpells(per_h=6.0, mean_s=60.0)
)


def rough_run(seed: int = 1, steps: int = 12) -> SimulatedRun:
    """Everything at once: relays, heavy tails, churn, jitter, loss, a wrong clock."""
    tables: dict[str, Any] = {
        "run": {"steps": steps},
        "tasks": [{"name": NAME}],
        "rollout": {"engine": "scripted", "rollouts_per_step": 32, "group_size": 4, "max_new_tokens": 2000},
        "staleness": {"budget": 4, "publish_period": 2},
        "coordinator": {"dead_after_s": 30.0, "stall_s": 900.0},
    }
    fleet = [
        WorkerModel(
            f"w{number}", LinkModel(latency_s=0.01 + 0.01 * number, jitter=0.5, loss=0.002), engine=ENGINE,
            clock_skew_s=100.0 * number, fate=ROUGH,
        )
        for number in range(12)
    ]  # fmt: skip
    fleet += [WorkerModel("late", fate=FateModel(arrives_s=200.0), group_s=10.0)]
    model = WorldModel(
        learner=LearnerModel(train_s=30.0, snapshot_bytes=20e6), relays="planned", uplink_bytes_per_s=20e6
    )
    return simulate(build_config(tables, check_places=False), fleet, seed=seed, model=model, until_s=100_000)


def test_a_rough_world_keeps_its_books_and_everything_happens_in_it() -> None:
    made = rough_run()
    for line in made.metrics:
        assert line.staleness_max <= 4
        assert line.generated == line.trained + line.expired + line.refused + line.buffered + line.failed
    told = Counter(event["kind"] for event in made.events)
    assert min(told["crashed"], told["cut_off"], told["preempted"], told["slowed"]) > 0
    assert made.metrics[-1].step == 11
    joined = {event["worker"]: event["at_s"] for event in made.events if event["kind"] == "worker_joined"}
    assert joined["late"] > 200.0


def test_fates_are_the_seeds_alone() -> None:
    def fates(made: SimulatedRun) -> list[tuple[float, str, str]]:
        kinds = ("crashed", "cut_off", "preempted", "slowed")
        return [(e["at_s"], e["kind"], e["program"]) for e in made.events if e["kind"] in kinds and e["at_s"] < 300]

    assert fates(rough_run(1)) == fates(rough_run(1, steps=10))
    assert fates(rough_run(1)) != fates(rough_run(2))


def test_a_rough_world_repeats_to_the_byte_in_another_process() -> None:
    """I10: strings hash differently there."""
    code = (
        "import sys, runpy; space = runpy.run_path(sys.argv[1]); "
        "print(hash('a'), space['blake3'](repr(space['rough_run']().events).encode()).hexdigest())"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, __file__], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    their_hash, their_log = done.stdout.split()
    assert int(their_hash) != hash("a")
    assert their_log == blake3(repr(rough_run().events).encode()).hexdigest()
