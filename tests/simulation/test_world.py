"""The production coordinator, learner and workers in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from echo2.config.load import build_config
from echo2.config.root import Config
from echo2.errors import Starved
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
