"""Figure 3c: how the learner's bubble falls as workers are added, for several staleness budgets.

``python experiments/fig3c_bubble/run.py`` plays the scenario beside this file in virtual time with more and more
workers, twice: with engines that stand still while a snapshot travels, which is what equation (2) assumes, and with
engines that go on, as the product's do, which is (2'). The knee is the least number of workers whose settled bubble is
below 1 %. Results go to ``results.json`` and ``bubble.svg``.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common
from matplotlib.axes import Axes

from echo2.provisioning.capacity import mu_min, mu_min_overlapped

HERE = Path(__file__).parent
SCENARIO = common.scenario(HERE)
BUDGETS = (3, 4, 6, 11)
GENERATIONS = ("pauses", "continues")
KNEE = 0.01
STEP = 4
"""Workers from one point of a curve to the next, away from the knee."""
NEAR_WORKERS, NEAR_SHARE = 2, 0.05
"""How far from its equation a knee may lie."""


class Case(NamedTuple):
    generation: str
    staleness_budget: int
    workers: int


SMALLEST = Case("continues", 3, 8)


def row(case: Case) -> dict[str, Any]:
    steps, warm_up = (24, 10) if case.staleness_budget < 11 else (32, 12)  # two publish periods at least
    seen = common.played(
        SCENARIO,
        {
            "world.generation": case.generation, "staleness.budget": case.staleness_budget,
            "workers.0.count": case.workers, "run.steps": steps, "world.warm_up_steps": warm_up,
        },
    ).outcome  # fmt: skip
    assert seen.t_bcast_s is not None, "something was published"
    assert seen.staleness is not None, "something was trained on"
    return {
        **case._asdict(),
        "bubble_ratio": seen.bubble_ratio_settled,
        "step_s": seen.step_s,
        "t_bcast_s": seen.t_bcast_s.p50,
        "staleness_mean": seen.staleness.mean,
        "staleness_max": seen.staleness.max,
        "expired": seen.expired,
    }


def required_workers(generation: str, staleness_budget: int) -> float:
    """By (2), or by (2'), at the times that the scenario states."""
    pace, rollout = SCENARIO["rehearsal"], SCENARIO["rollout"]
    kappa, t_gen_s = staleness_budget - 1, pace["group_s"] * math.exp(pace["group_spread"] ** 2 / 2)
    times = {
        "t_train_s": pace["train_s"],
        "t_bcast_s": pace["snapshot_bytes"] * 8 / (SCENARIO["workers"][0]["down_mbps"] * 1e6),
        "publish_period": kappa,
        "rollouts_per_step": rollout["rollouts_per_step"],
    }
    if generation == "pauses":
        needed_per_s = mu_min(**times)
    else:
        needed_per_s = mu_min_overlapped(**times, t_gen_s=t_gen_s, staleness_budget=staleness_budget)
    return float(needed_per_s * t_gen_s / rollout["group_size"])


def curve(generation: str, staleness_budget: int) -> list[dict[str, Any]]:
    """Far below what the equation asks for, then one worker more or less until the knee is passed, then above it."""
    near = round(required_workers(generation, staleness_budget))

    def played(workers: int) -> float:
        points.extend(common.rows(row, [Case(generation, staleness_budget, workers)]))
        return float(points[-1]["bubble_ratio"])

    points: list[dict[str, Any]] = []
    played(near - 2 * STEP)
    played(near - STEP)
    workers = near
    while played(workers) >= KNEE:
        workers += 1
    played(workers + STEP)
    if workers == near:  # the knee is here or below
        while played(workers - 1) < KNEE:
            workers -= 1
    return sorted(points, key=lambda point: int(point["workers"]))


def knee(points: list[dict[str, Any]]) -> int | None:
    """The least number of workers from which on the bubble stays below ``KNEE``; None where it does not."""
    above = max((point["workers"] for point in points if point["bubble_ratio"] >= KNEE), default=None)
    return min((point["workers"] for point in points if above is None or point["workers"] > above), default=None)


def judged(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for generation in GENERATIONS:
        for budget in BUDGETS:
            mine = [p for p in points if (p["generation"], p["staleness_budget"]) == (generation, budget)]
            measured, required = knee(mine), required_workers(generation, budget)
            apart = math.inf if measured is None else abs(measured - required)
            found.append(
                {
                    "generation": generation, "staleness_budget": budget, "equation_workers": required,
                    "knee_workers": measured,
                    "agrees": apart <= max(NEAR_WORKERS, NEAR_SHARE * required),
                }
            )  # fmt: skip
    return found


def draw(results: dict[str, Any]) -> None:
    def paint(*axes: Axes) -> None:
        for panel, generation, equation in zip(axes, GENERATIONS, ("(2)", "(2')"), strict=True):
            for place, budget in enumerate(BUDGETS):
                mine = [r for r in results["rows"] if (r["generation"], r["staleness_budget"]) == (generation, budget)]
                colour = f"C{place}"
                panel.plot(
                    [r["workers"] for r in mine], [100 * r["bubble_ratio"] for r in mine], "o-",
                    color=colour, markersize=3, label=f"S = {budget}, kappa = {budget - 1}",
                )  # fmt: skip
                panel.axvline(required_workers(generation, budget), color=colour, linestyle="--", linewidth=0.9)
            panel.set(
                xlabel="workers",
                ylabel="bubble, %",
                title=f"generation {generation}; dashed: {equation}",
                ylim=(-1, 45),
            )
            panel.legend(fontsize=8)

    common.draw(HERE / "bubble.svg", paint, columns=2)


def main() -> None:
    points = [point for generation in GENERATIONS for budget in BUDGETS for point in curve(generation, budget)]
    results = {"judged": judged(points), "rows": points}
    common.write(HERE, results)
    draw(common.read(HERE))
    for line in results["judged"]:
        print(line)


if __name__ == "__main__":
    main()
