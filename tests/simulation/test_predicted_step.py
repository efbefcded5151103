"""The predicted step (2') beside the production coordinator and workers in virtual time."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from echo2.config.load import build_config
from echo2.provisioning.demand import Cadence, Times, step_period_s
from echo2.simulation.links import LinkModel
from echo2.simulation.models import LearnerModel, WorkerModel, WorldModel
from echo2.simulation.world import simulate

STEPS, ROWS, GROUP, LANES, GROUP_S, SPREAD = 40, 64, 4, 2, 5.0, 0.25


@pytest.mark.parametrize(
    ("staleness_budget", "publish_period", "workers", "checkpoint_s"),
    [
        (3, 2, 2, 8.0),  # too few workers
        (3, 2, 5, 16.0),  # the old snapshot's trajectories run out before the new one's arrive
        (6, 5, 8, 8.0),  # enough of everything
    ],
)
def test_a_simulated_step_lies_between_the_predictions_with_and_without_t_gen(
    staleness_budget: int, publish_period: int, workers: int, checkpoint_s: float
) -> None:
    """With it the prediction is a little long: workers that the lease gate held begin together with the install."""
    tables: dict[str, Any] = {
        "run": {"steps": STEPS},
        "rollout": {
            "engine": "scripted", "rollouts_per_step": ROWS, "group_size": GROUP, "concurrent_groups": LANES,
        },
        "staleness": {"budget": staleness_budget, "publish_period": publish_period},
    }  # fmt: skip
    models = [
        WorkerModel(f"w{k}", LinkModel(latency_s=0.02), group_s=GROUP_S, spread=SPREAD, activation_s=0.05)
        for k in range(workers)
    ]
    learner = LearnerModel(spread=0.05, checkpoint_s=checkpoint_s, snapshot_s=0.01, snapshot_bytes=1e6)
    world = WorldModel(learner=learner, delta_bytes=1e4)
    run = simulate(build_config(tables, check_places=False), models, model=world)
    settled = run.metrics[STEPS // 3 :]
    step_s = (settled[-1].elapsed_s - settled[0].elapsed_s) / (len(settled) - 1)

    mean_group_s = GROUP_S * math.exp(SPREAD**2 / 2)
    mu_per_s = workers * LANES * GROUP / mean_group_s
    measured = {
        "t_train_s": statistics.fmean(line.t_train_s for line in settled),
        "t_bcast_s": statistics.median(line.t_bcast_s or 0.0 for line in settled),
        "rollouts_per_step": ROWS,
    }
    cadence = Cadence(staleness_budget, publish_period)
    longest, shortest = (
        step_period_s(Times(**measured, t_gen_s=t_gen_s), cadence, mu_per_s) for t_gen_s in (mean_group_s, 0.0)
    )
    assert 0.98 * shortest <= step_s <= 1.08 * longest
