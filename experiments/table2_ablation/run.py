"""Table 2: what the peer-assisted broadcast and the cost-aware choice of machines are each worth.

``python experiments/table2_ablation/run.py`` plays the mixed-price pool of the scenario beside this file in virtual
time, as it is, without peers (NoP2P: a star) and without regard to cost (NoCost: random machines), with the controller
on, at several uplinks of the learner. Results go to ``results.json`` and ``ablation.svg``.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common
from matplotlib.axes import Axes

HERE = Path(__file__).parent
SCENARIO = common.scenario(HERE)
WARM_UP = SCENARIO["world"]["warm_up_steps"]
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "NoP2P": {"broadcast.topology": "star"},
    "NoCost": {"provisioning.policy": "random"},
}
RULES = {"paper": "(2)", "overlapped": "(2')"}
UPLINKS_MBPS = (1000.0, 800.0)


class Case(NamedTuple):
    variant: str
    rule: str
    uplink_mbps: float


CASES = [Case(variant, rule, uplink) for rule in RULES for uplink in UPLINKS_MBPS for variant in VARIANTS]
SMALLEST = Case("full", "overlapped", UPLINKS_MBPS[0])


def row(case: Case) -> dict[str, Any]:
    done = common.played(
        SCENARIO,
        {**VARIANTS[case.variant], "provisioning.rule": case.rule, "world.uplink_mbps": case.uplink_mbps},
    )
    settled, seen = done.run.metrics[WARM_UP:], done.outcome
    return {
        **case._asdict(),
        "machines": statistics.fmean(line.workers_active for line in settled),
        "t_bcast_s": statistics.median(line.t_bcast_s for line in settled if line.t_bcast_s is not None),
        "wait_s": statistics.fmean(line.idle_s for line in settled),
        "pool_usd_per_h": statistics.fmean(line.usd_per_h for line in settled)
        - SCENARIO["provisioning"]["learner_usd_per_h"],
        "usd_per_step": statistics.fmean(line.step_cost_usd for line in settled),
        "mu_target_per_s": seen.mu_target_per_s,
        "mu_pool_per_s": seen.mu_pool_per_s,
    }


def draw(results: dict[str, Any]) -> None:
    keys = {"machines": "machines", "t_bcast_s": "T_bcast, s", "wait_s": "wait, s a step", "usd_per_step": "USD a step"}

    def paint(*axes: Axes) -> None:
        kinds = list(dict.fromkeys((line["rule"], line["uplink_mbps"]) for line in results["rows"]))
        for panel, (key, title) in zip(axes, keys.items(), strict=True):
            for place, variant in enumerate(VARIANTS):
                mine = [line[key] for line in results["rows"] if line["variant"] == variant]
                panel.bar([k + (place - 1) * 0.27 for k in range(len(mine))], mine, width=0.25, label=variant)
            labels = [f"{RULES[rule]}\n{up:g}" for rule, up in kinds]
            panel.set_xticks(range(len(kinds)), labels=labels, fontsize=8)
            panel.set_title(title)
        axes[0].set_xlabel("rule, B_0 in Mbps")
        axes[0].legend(fontsize=8)

    common.draw(HERE / "ablation.svg", paint, columns=len(keys), width_in=3.0, height_in=3.0)


def main() -> None:
    common.write(HERE, {"rows": common.rows(row, CASES)})
    draw(common.read(HERE))


if __name__ == "__main__":
    main()
