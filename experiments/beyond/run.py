"""Past the paper: deltas, rough pools, a model too big for whole snapshots, the choice of kappa, what to change first.

``python experiments/beyond/run.py`` plays variants of the scenario beside this file in virtual time, with the
controller renting the pool. Results go to ``results.json`` and ``beyond.svg``.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common
from matplotlib.axes import Axes

from echo2.provisioning.demand import Cadence, Demand
from echo2.simulation.scenario import build_scenario

HERE = Path(__file__).parent
SCENARIO = common.scenario(HERE)
WARM_UP = SCENARIO["world"]["warm_up_steps"]
PAPER = {"provisioning.rule": "paper"}
DELTAS = {"world.delta_share": 0.01}
BIG = {"rehearsal.snapshot_bytes": 6_550_000_000}
"""A tenth of 32 billion parameters in bf16: 524 s at 100 Mbps, 3.2 T_train."""
ROUGH = {
    f"offers.{kind}.{key}": value
    for kind in range(2)
    for key, value in {
        "preemptions_per_h": 0.3, "crashes_per_h": 0.5, "outages_per_h": 0.5, "outage_s": 30.0,
        "slow_spells_per_h": 1.0, "slow_spell_s": 120.0, "group_spread": 0.5, "loss": 0.005,
    }.items()
}  # fmt: skip
"""Per hour of a scenario in which everything takes a tenth of its time."""
LONG = {"offers.0.group_s": 70.0, "offers.1.group_s": 70.0}
"""T_gen 0.43 T_train, as long replies have it."""
SIX = {**LONG, "staleness.budget": 6}
STAR = {"broadcast.topology": "star", "world.uplink_mbps": 600.0}
CASES: dict[str, dict[str, Any]] = {
    "whole, pool by (2)": PAPER,
    "whole": {},
    "deltas, pool by (2)": {**PAPER, **DELTAS},
    "deltas": DELTAS,
    "rough pool, whole": ROUGH,
    "rough pool, deltas": {**ROUGH, **DELTAS},
    "32B, whole, S = 7, kappa = 4": {**BIG, "staleness.budget": 7, "staleness.publish_period": 4},
    "32B, deltas": {**BIG, **DELTAS},
    "S = 6, long groups, kappa = 5": {**SIX, "staleness.publish_period": 5},
    "S = 6, long groups, kappa = 2": {**SIX, "staleness.publish_period": 2},
    "star, 600 Mbps": STAR,
    "star, 600 Mbps, deltas": {**STAR, **DELTAS},
    "long groups": LONG,
    "long groups, uplink x 2": {**LONG, "world.uplink_mbps": 2000.0},
    "long groups, S = 4, kappa = 3": {**LONG, "staleness.budget": 4},
    "long groups, S = 4, kappa = 2": {**LONG, "staleness.budget": 4, "staleness.publish_period": 2},
    "long groups, deltas": {**LONG, **DELTAS},
    "long groups, prices - 20 %": {**LONG, "offers.0.usd_per_h": 0.40, "offers.1.usd_per_h": 0.44},
}
SMALLEST = "deltas"


def row(name: str) -> dict[str, Any]:
    done = common.played(SCENARIO, CASES[name])
    settled, seen = done.run.metrics[WARM_UP:], done.outcome
    assert seen.staleness is not None, "it trained"
    return {
        "case": name,
        "machines": statistics.fmean(line.workers_active for line in settled),
        "t_bcast_s": statistics.median(line.t_bcast_s for line in settled if line.t_bcast_s is not None),
        "wait_s": statistics.fmean(line.idle_s for line in settled),
        "step_s": seen.step_s,
        "usd_per_step": statistics.fmean(line.step_cost_usd for line in settled),
        "pool_usd_per_h": statistics.fmean(line.usd_per_h for line in settled)
        - SCENARIO["provisioning"]["learner_usd_per_h"],
        "staleness_mean": seen.staleness.mean,
        "staleness_max": seen.staleness.max,
        "expired_share": seen.expired / seen.generated,
        "losses": seen.losses,
    }


def impossible() -> str:
    """Why a whole snapshot of the big model serves no pool."""
    return build_scenario(common.varied(SCENARIO, BIG)).impossible()


def required_by_kappa() -> dict[str, float]:
    """By (2') for the long groups: what ``auto`` compares, traffic apart."""
    scenario = build_scenario(common.varied(SCENARIO, SIX))
    demand = Demand(times=scenario.times(), rule="overlapped", gamma=1.0)
    return {str(kappa): demand.required_per_s(Cadence(6, kappa)) for kappa in range(2, 6)}


def draw(results: dict[str, Any]) -> None:
    def paint(*axes: Axes) -> None:
        found = results["rows"]
        names = [line["case"] for line in found]
        for panel, key, title in zip(
            axes, ("usd_per_step", "wait_s"), ("USD a step, learner included", "wait, s a step"), strict=True
        ):
            panel.barh(range(len(found)), [line[key] for line in found], color="C0")
            panel.set_title(title)
            panel.set_yticks(range(len(found)), labels=names, fontsize=8)
            panel.invert_yaxis()

    common.draw(HERE / "beyond.svg", paint, columns=2, width_in=6.0)


def main() -> None:
    found = common.rows(row, CASES)
    common.write(HERE, {"whole_32b": impossible(), "required_per_s_by_kappa": required_by_kappa(), "rows": found})
    draw(common.read(HERE))


if __name__ == "__main__":
    main()
