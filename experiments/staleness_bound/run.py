"""The paper's appendix A: how stale data is, batch by batch, against S and against equations (7) and (12).

``python experiments/staleness_bound/run.py`` plays the scenario beside this file over a grid of S, kappa, T_bcast,
spreads of all times, capacity and faults. S must hold in every batch. (7) and (12) are plans: each batch that was older
than one of them, at the times measured when it was trained on, is counted under its cause. Results go to
``results.json`` and ``staleness.svg``.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common
from matplotlib.axes import Axes

from echo2.metrics import StepMetrics
from echo2.provisioning.capacity import mu_min_overlapped, overlap_holds, staleness_bound
from echo2.simulation.play import Played

HERE = Path(__file__).parent
SCENARIO = common.scenario(HERE)
T_TRAIN_S: float = SCENARIO["rehearsal"]["train_s"]
T_GEN_S: float = SCENARIO["rehearsal"]["group_s"]
ROWS_PER_STEP, GROUP = (SCENARIO["rollout"][key] for key in ("rollouts_per_step", "group_size"))
WARM_UP = SCENARIO["world"]["warm_up_steps"]
CADENCES = ((3, 2), (4, 2), (4, 3), (6, 2), (6, 5))
SPREADS = {"narrow": (0.05, 0.0), "wide": (0.4, 0.15)}
"""Log-normal sigma of a group's time and of a training step's."""
FAULTS = {
    "none": {},
    "many": {"workers.0.crashes_per_h": 0.6, "workers.0.outages_per_h": 0.6, "workers.0.outage_s": 60.0},
}
"""Per worker; a run lasts about an hour."""


class Case(NamedTuple):
    staleness_budget: int
    publish_period: int
    t_bcast: float
    """In T_train, without what draining takes."""
    spread: str
    faults: str
    capacity: float
    """In what (2') requires."""
    order: str = "oldest"
    """Which admissible groups a batch takes first; ``oldest`` is the default of a run."""


GRID = [
    *(Case(*cadence, 0.8, "narrow", "none", capacity) for cadence in CADENCES for capacity in (0.8, 1.1, 1.5)),
    *(Case(*cadence, 0.2, "narrow", "none", capacity) for cadence in CADENCES for capacity in (1.1, 1.5)),
    *(Case(*cadence, 0.8, "wide", faults, 1.1) for cadence in CADENCES for faults in FAULTS),
    *(Case(*cadence, 0.2, "wide", "many", 1.1) for cadence in CADENCES),
    *(Case(*cadence, t_bcast, "narrow", "none", 1.5, "freshest") for cadence in CADENCES for t_bcast in (0.2, 0.8)),
]
SMALLEST = Case(3, 2, 0.8, "narrow", "none", 0.8)


def row(case: Case) -> dict[str, Any]:
    group_spread, train_spread = SPREADS[case.spread]
    line_mbps = SCENARIO["workers"][0]["down_mbps"]
    done = common.played(
        SCENARIO,
        {
            "staleness.budget": case.staleness_budget,
            "staleness.publish_period": case.publish_period,
            "buffer.order": case.order,
            "rehearsal.snapshot_bytes": round(case.t_bcast * T_TRAIN_S * line_mbps * 1e6 / 8),
            "rehearsal.group_spread": group_spread,
            "rehearsal.train_spread": train_spread,
            "workers.0.count": workers(case),
            **FAULTS[case.faults],
        },
    )
    seen = done.outcome
    assert seen.t_bcast_s is not None, "something was published"
    return {
        **case._asdict(),
        "workers": workers(case),
        "bubble_ratio": seen.bubble_ratio_settled,
        "t_bcast_measured": seen.t_bcast_s.p50 / T_TRAIN_S,
        "batches": seen.steps,
        "staleness_mean": statistics.fmean(line.staleness_mean for line in done.run.metrics[WARM_UP:]),
        "staleness_mean_least": least_mean(case),
        "staleness_max": max(line.staleness_max for line in done.run.metrics),
        "expired_share": seen.expired / seen.generated,
        "above_7": excesses(case, done, "staleness_bound"),
        "above_12": excesses(case, done, "staleness_bound_tight"),
    }


def workers(case: Case) -> int:
    """So many that they deliver ``capacity`` times what (2') requires, from half a worker on one more."""
    needed_per_s = mu_min_overlapped(
        t_train_s=T_TRAIN_S, t_bcast_s=case.t_bcast * T_TRAIN_S, t_gen_s=T_GEN_S, rollouts_per_step=ROWS_PER_STEP,
        staleness_budget=case.staleness_budget, publish_period=case.publish_period,
    )  # fmt: skip
    return round(case.capacity * needed_per_s * T_GEN_S / int(GROUP))


def least_mean(case: Case) -> float:
    """Of batches that are each made of the newest version that any batch could be made of by then."""
    first_age: int = max(1, math.ceil(case.t_bcast + T_GEN_S / T_TRAIN_S))
    return first_age + (case.publish_period - 1) / 2


# ---- excesses and their causes ---------------------------------------------------------------------------------------


def excesses(case: Case, done: Played, bound: str) -> dict[str, int]:
    """Batches older than the bound, by cause."""
    found: Counter[str] = Counter()
    for line in done.run.metrics:
        planned = getattr(line, bound)
        if planned is not None and line.staleness_max > planned:
            found[cause(case, done, line, bound)] += 1
    return dict(sorted(found.items()))


def cause(case: Case, done: Played, line: StepMetrics, bound: str) -> str:
    """The first that suffices."""
    times: Mapping[str, Any] = {
        "t_train_s": T_TRAIN_S, "t_bcast_s": line.t_bcast_s or 0.0, "publish_period": case.publish_period,
        "rollouts_per_step": ROWS_PER_STEP, "mu_pool_per_s": line.mu_pool_per_s,
    }  # fmt: skip
    events: list[dict[str, Any]] = done.run.events
    formed_s = next(e["at_s"] for e in events if e["kind"] == "batch" and e["step"] == line.step)
    if fresh_rows(done, line.step, line.step - int(getattr(line, bound)), formed_s) >= ROWS_PER_STEP:
        return "queue: fresh ones were there, but the oldest go first"
    faults_s = [e["at_s"] for e in events if e["kind"] in ("killed", "cut_off")]
    if any(0 <= formed_s - at_s <= 2 * case.publish_period * T_TRAIN_S for at_s in faults_s):
        return "fault within two publish periods"
    if bound == "staleness_bound_tight" and not overlap_holds(**times):
        return "(12) presumes (1), which did not hold"
    with_generation = staleness_bound(**{**times, "t_bcast_s": times["t_bcast_s"] + T_GEN_S})
    if line.staleness_max <= with_generation:
        return "T_gen is left out"
    return "left behind by freshest-first" if case.order == "freshest" else "spread of times"


def fresh_rows(done: Played, step: int, version: int, formed_s: float) -> int:
    """Trajectories of this version or a newer one that lay untrained in the buffer as the batch was formed."""
    sampled: dict[str, int] = {}
    delivered = 0
    events: list[dict[str, Any]] = done.run.events
    for event in events:
        if event["at_s"] >= formed_s:
            break
        if event["kind"] == "lease":
            sampled[event["lease"]] = int(event["policy"].partition(".")[2])
        elif event["kind"] == "submit":
            delivered += GROUP * (sampled[event["lease"]] >= version)
    trained = sum(
        count
        for line in done.run.metrics[:step]
        for age, count in line.staleness_histogram.items()
        if line.step - int(age) >= version
    )
    return delivered - trained


def draw(results: dict[str, Any]) -> None:
    def paint(axes: Axes) -> None:
        for place, line in enumerate(results["rows"]):
            axes.plot([place, place], [line["staleness_mean"], line["staleness_max"]], color="C0", linewidth=1)
            axes.plot(place, line["staleness_budget"], "_", color="C3", markersize=7)
            axes.plot(place, line["staleness_mean"], "o", color="C0", markersize=3)
            axes.plot(place, line["staleness_mean_least"], "x", color="black", markersize=3)
        axes.set(xlabel="case", ylabel="training steps", ylim=(0, 6.5))
        axes.set_title("staleness: mean (dot) to most, S (red), least possible mean (x)")

    common.draw(HERE / "staleness.svg", paint, width_in=8.0)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    causes: dict[str, Counter[str]] = {"above_7": Counter(), "above_12": Counter()}
    for line in found:
        for bound, counted in causes.items():
            counted.update(line[bound])
    ample = [r for r in found if r["capacity"] >= 1.1 and (r["spread"], r["order"]) == ("narrow", "oldest")]
    return {
        "batches": sum(line["batches"] for line in found),
        "cases_beyond_budget": sum(line["staleness_max"] > line["staleness_budget"] for line in found),
        **{bound: dict(sorted(counted.items())) for bound, counted in causes.items()},
        "expired_share_with_surplus_most": max(line["expired_share"] for line in ample),
    }


def main() -> None:
    found = common.rows(row, GRID)
    results = {"summary": summary(found), "rows": found}
    common.write(HERE, results)
    draw(common.read(HERE))
    print(results["summary"])


if __name__ == "__main__":
    main()
