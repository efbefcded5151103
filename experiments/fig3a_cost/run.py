"""Figures 3a and 5: what training costs, step by step, against centralised training on one data centre's GPUs.

``python experiments/fig3a_cost/run.py`` plays each ECHO-2 case of the scenario beside this file in virtual time, with
the controller renting the pool, and counts GPU hours. The centralised systems' steps are as long as the paper says, on
eight A100 each. Results go to ``results.json`` and ``cost.svg``.
"""

from __future__ import annotations

import statistics
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common
from matplotlib.axes import Axes

HERE = Path(__file__).parent
SCENARIO = common.scenario(HERE)
WARM_UP = SCENARIO["world"]["warm_up_steps"]
CENTRAL_GPUS, LEARNER_GPUS = 8, 4
CENTRAL_STEP_S = {"8B": {"verl sync": 1508.2, "verl async": 1582.3}, "4B": {"verl sync": 754.1, "verl async": 791.15}}
"""8B: the paper's; 4B: assumed to be half of that."""
A100_USD_PER_H = (3.67, 5.07)
RTX5090_USD_PER_H = (0.35, 0.60)
"""The paper's Table 1 is not at hand: Google Cloud's A100 (40 and 80 GB, on demand) and offers of vast.ai."""
MIDDLE = (5.07, 0.50)


class Case(NamedTuple):
    model: str
    staleness_budget: int
    rule: str


T_TRAIN_S = {("8B", 3): 1631.2, ("8B", 4): 1649.3, ("4B", 3): 815.6}
"""8B: the paper's; 4B: assumed to be half of that."""
SNAPSHOT_BYTES = {"8B": 16_400_000_000, "4B": 8_000_000_000}
GROUP_S = {"8B": 320.0, "4B": 160.0}
"""Of 16 replies, four groups side by side: 0.2 and 0.4 trajectories/s from one RTX 5090, assumed."""
CASES = [Case(*timed, rule) for timed in T_TRAIN_S for rule in ("overlapped", "paper")]
SMALLEST = CASES[-2]


def row(case: Case) -> dict[str, Any]:
    done = common.played(
        SCENARIO,
        {
            "staleness.budget": case.staleness_budget,
            "rehearsal.train_s": T_TRAIN_S[case.model, case.staleness_budget],
            "rehearsal.snapshot_bytes": SNAPSHOT_BYTES[case.model],
            "rehearsal.group_s": GROUP_S[case.model],
            "provisioning.rule": case.rule,
        },
    )
    lines, learner_usd_per_h = done.run.metrics, SCENARIO["provisioning"]["learner_usd_per_h"]
    gpu_usd_per_h = SCENARIO["offers"][0]["usd_per_h"]
    ends_s = [0.0, *(line.elapsed_s for line in lines)]
    steps_s = [after - before for before, after in pairwise(ends_s)]
    machine_h = [
        (line.step_cost_usd - learner_usd_per_h * step_s / 3600) / gpu_usd_per_h
        for line, step_s in zip(lines, steps_s, strict=True)
    ]
    settled = slice(WARM_UP, None)
    assert done.outcome.t_bcast_s is not None, "something was published"
    assert done.outcome.staleness is not None, "something was trained on"
    return {
        **case._asdict(),
        "step_s": statistics.fmean(steps_s[settled]),
        "machine_h_per_step": statistics.fmean(machine_h[settled]),
        "machines": statistics.fmean(line.workers_active for line in lines[settled]),
        "bubble_ratio": done.outcome.bubble_ratio_settled,
        "t_bcast_s": done.outcome.t_bcast_s.p50,
        "staleness_mean": done.outcome.staleness.mean,
        "steps_s": steps_s,
        "machine_h": machine_h,
    }


def usd(found: dict[str, Any], prices: tuple[float, float]) -> float:
    """Of a settled step of ECHO-2.  prices: USD/h of an A100 and of an RTX 5090."""
    return float(found["step_s"]) / 3600 * LEARNER_GPUS * prices[0] + float(found["machine_h_per_step"]) * prices[1]


def saving(found: dict[str, Any], against: str, prices: tuple[float, float]) -> float:
    """At equal steps."""
    return 1 - usd(found, prices) / (CENTRAL_STEP_S[found["model"]][against] / 3600 * CENTRAL_GPUS * prices[0])


def judged(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    corners = [(p, q) for p in A100_USD_PER_H for q in RTX5090_USD_PER_H]
    return [
        {
            "model": line["model"],
            "staleness_budget": line["staleness_budget"],
            "rule": line["rule"],
            "against": against,
            "usd_per_step": usd(line, MIDDLE),
            "saving": saving(line, against, MIDDLE),
            "saving_least": min(saving(line, against, prices) for prices in corners),
            "saving_most": max(saving(line, against, prices) for prices in corners),
            "pool_over_a100": line["machine_h_per_step"] * 3600 / line["step_s"] * MIDDLE[1] / MIDDLE[0],
        }
        for line in found
        for against in CENTRAL_STEP_S[line["model"]]
    ]


def draw(results: dict[str, Any]) -> None:
    def paint(*axes: Axes) -> None:
        for panel, model in zip(axes, CENTRAL_STEP_S, strict=True):
            for name, step_s in CENTRAL_STEP_S[model].items():
                step_usd = step_s / 3600 * CENTRAL_GPUS * MIDDLE[0]
                counts = range(1, SCENARIO["run"]["steps"] + 1)
                panel.plot(counts, [step_usd * count for count in counts], "--", label=name)
            for line in results["rows"]:
                if line["model"] == model:
                    spent = accumulate(
                        s / 3600 * LEARNER_GPUS * MIDDLE[0] + h * MIDDLE[1]
                        for s, h in zip(line["steps_s"], line["machine_h"], strict=True)
                    )
                    rule = "(2')" if line["rule"] == "overlapped" else "(2)"
                    label = f"ECHO-2, S = {line['staleness_budget']}, pool by {rule}"
                    panel.plot(range(1, len(line["steps_s"]) + 1), list(spent), label=label)
            panel.set(xlabel="training step", ylabel="USD since the start", title=f"Qwen3-{model}")
            panel.legend(fontsize=7)

    common.draw(HERE / "cost.svg", paint, columns=2, width_in=5.0)


def main() -> None:
    found = common.rows(row, CASES)
    results = {"prices_usd_per_h": {"A100": MIDDLE[0], "RTX 5090": MIDDLE[1]}, "judged": judged(found), "rows": found}
    common.write(HERE, results)
    draw(common.read(HERE))
    for line in results["judged"]:
        print(common.rounded(line))


if __name__ == "__main__":
    main()
