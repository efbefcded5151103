"""Figure 4 in virtual time, for more workers than a machine can emulate.

``python experiments/fig4_broadcast/simulate.py`` sends one snapshot along the production plan to N workers and writes
``simulated.json`` and ``simulated.svg``; what ``run.py`` measured is left alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common
from matplotlib.axes import Axes

HERE = Path(__file__).parent
SCENARIO = common.scenario(HERE, "simulated.toml")
RESULTS = "simulated.json"
WORKER_MBPS = 100.0
WORKERS = (4, 8, 16, 32, 64, 128)
LIMITED_MBPS = (300, 500, 800)
NEAR_SHARE = 0.10


class Case(NamedTuple):
    topology: str
    uplink_mbps: float | None
    """None for a line that all workers together cannot fill."""
    workers: int


CASES = [
    Case(topology, uplink_mbps, workers)
    for topology, uplinks in (("star", (None, *LIMITED_MBPS)), ("chain", LIMITED_MBPS))
    for uplink_mbps in uplinks
    for workers in WORKERS
]
SMALLEST = CASES[0]


def row(case: Case) -> dict[str, Any]:
    seen = common.played(
        SCENARIO,
        {
            "broadcast.topology": case.topology,
            "world.uplink_mbps": case.uplink_mbps or case.workers * WORKER_MBPS,
            "workers": [{"name": "worker", "count": case.workers, "down_mbps": WORKER_MBPS, "activation_s": 0.0}],
        },
    ).outcome
    assert seen.t_bcast_s is not None, "the snapshot arrived"
    return {**case._asdict(), "t_bcast_s": seen.t_bcast_s.max}


def judged(found: list[dict[str, Any]]) -> dict[str, Any]:
    ideal = {r["workers"]: r["t_bcast_s"] for r in found if r["topology"] == "star" and r["uplink_mbps"] is None}
    above = {
        f"{uplink_mbps} Mbps": [
            r["t_bcast_s"] / ideal[r["workers"]] - 1
            for r in found
            if r["topology"] == "chain" and r["uplink_mbps"] == uplink_mbps
        ]
        for uplink_mbps in LIMITED_MBPS
    }
    agrees = max(share for shares in above.values() for share in shares) <= NEAR_SHARE
    return {"workers": WORKERS, "chain_above_unlimited_star": above, "agrees": agrees}


def draw(results: dict[str, Any]) -> None:
    def paint(axes: Axes) -> None:
        kinds = dict.fromkeys((r["topology"], r["uplink_mbps"]) for r in results["rows"])
        for topology, uplink_mbps in kinds:
            mine = [r for r in results["rows"] if (r["topology"], r["uplink_mbps"]) == (topology, uplink_mbps)]
            label = f"{topology}, " + ("unlimited" if uplink_mbps is None else f"{uplink_mbps} Mbps")
            colour = "black" if uplink_mbps is None else f"C{LIMITED_MBPS.index(uplink_mbps)}"
            style = "o-" if topology == "chain" else "s--"
            axes.plot([r["workers"] for r in mine], [r["t_bcast_s"] for r in mine], style, color=colour, label=label)
        axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="T_bcast, seconds")
        axes.set_xticks(WORKERS, labels=[str(count) for count in WORKERS])
        axes.minorticks_off()
        axes.set_title("1.64 GB, workers' lines 100 Mbps, in virtual time")
        axes.legend(fontsize=8)

    common.draw(HERE / "simulated.svg", paint)


def main() -> None:
    found = common.rows(row, CASES)
    results = {"judged": judged(found), "rows": found}
    common.write(HERE, results, RESULTS)
    draw(common.read(HERE, RESULTS))
    print(results["judged"])


if __name__ == "__main__":
    main()
