"""Scenarios that take a fraction of a second."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from echo2.metrics import StepMetrics
from echo2.simulation.scenario import Scenario, build_scenario

SMALL: dict[str, Any] = {
    "run": {"steps": 8},
    "rollout": {"rollouts_per_step": 16, "group_size": 4, "max_new_tokens": 64},
    "staleness": {"budget": 4, "publish_period": 2},
    "rehearsal": {"train_s": 30.0, "group_s": 15.0, "snapshot_bytes": 10_000_000},
    "coordinator": {"stall_s": 600.0, "dead_after_s": 30.0},
    "workers": [{"name": "card", "count": 3, "usd_per_h": 0.5}],
}

DISTURBED: dict[str, Any] = {
    "run": {"steps": 20},
    "rollout": {"rollouts_per_step": 32, "group_size": 4, "max_new_tokens": 512},
    "staleness": {"budget": 4, "publish_period": 2},
    "rehearsal": {"train_s": 60.0, "snapshot_bytes": 100_000_000},
    "coordinator": {"stall_s": 2000.0, "dead_after_s": 60.0},
    "provisioning": {"period_s": 60.0, "cool_down_s": 60.0, "learner_usd_per_h": 4.0},
    "workers": [
        {
            "name": "own", "count": 2, "usd_per_h": 0.3, "tokens_per_s": 20.0, "median_tokens": 300.0,
            "arrives_every_s": 200.0, "crashes_per_h": 2.0, "outages_per_h": 4.0, "slow_spells_per_h": 4.0,
            "loss": 0.01,
        },
    ],
    "offers": [
        {
            "name": "cheap", "count": 6, "usd_per_h": 0.4, "tokens_per_s": 20.0, "median_tokens": 300.0,
            "tail": "pareto", "tail_spread": 0.5, "preemptions_per_h": 3.0, "slow_spells_per_h": 2.0, "up_mbps": 20.0,
        },
        {"name": "dear", "count": 6, "usd_per_h": 0.9, "tokens_per_s": 30.0, "median_tokens": 300.0},
    ],
    "events": [
        {"what": "kill", "who": "coordinator", "at_step": 6, "for_s": 20.0},
        {"what": "kill", "who": "learner", "at_s": 500.0, "for_s": 30.0},
        {"what": "price", "who": "cheap", "at_s": 300.0, "usd_per_h": 2.0},
        {"what": "preempt", "who": "*-1", "at_step": 9},
        {"what": "slow", "who": "learner", "at_step": 12, "factor": 2.0, "for_s": 300.0},
        {"what": "cut", "who": "*", "most": 2, "at_step": 14, "for_s": 40.0},
    ],
}  # fmt: skip
"""Whatever can happen happens."""


def tables(base: dict[str, Any] = SMALL, **changes: Any) -> dict[str, Any]:
    """changes: keys of a table over those that are there; an array instead of the one that is there."""
    made = deepcopy(base)
    for name, value in changes.items():
        below = made.get(name, {})
        made[name] = {**below, **value} if isinstance(value, dict) and isinstance(below, dict) else value
    return made


def scenario(*overrides: str, base: dict[str, Any] = SMALL, **changes: Any) -> Scenario:
    return build_scenario(tables(base, **changes), overrides, name="small")


def line(step: int, **changes: Any) -> StepMetrics:
    """Of a run that trains on 8 rows a step, takes 12 s for one, of which it waits 2, and loses nothing."""
    values: dict[str, Any] = {
        "step": step, "policy_incarnation": 0, "wall_time": 12.0 * (step + 1), "elapsed_s": 12.0 * (step + 1),
        "reward_mean": 0.5, "reward_trained_mean": 0.5, "reward_by_task": {"arithmetic": 0.5},
        "staleness_min": 0, "staleness_mean": 1.5, "staleness_max": 2, "staleness_histogram": {"1": 4, "2": 4},
        "staleness_bound": None, "staleness_bound_tight": None,
        "bubble_ratio": 2 / 12, "idle_s": 2.0, "t_train_s": 10.0, "t_bcast_s": None,
        "mu_pool_per_s": 1.0, "mu_min_per_s": None, "workers_active": 2,
        "generated": 8 * (step + 1) + 4, "trained": 8 * (step + 1), "expired": 0, "refused": 0, "buffered": 4,
        "failed": 0, "refused_by": {}, "unattributed": 0, "groups_dropped": 0, "zero_variance_groups": 0,
        "length_mean": 5.0, "truncated_share": 0.0, "cost_usd": 0.1 * (step + 1), "usd_per_h": 30.0,
        "snapshot_bytes": 1000, "learner": {},
    }  # fmt: skip
    return StepMetrics(**{**values, **changes})
