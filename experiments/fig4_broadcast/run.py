"""Figure 4 of the paper: broadcast time against the number of workers, measured over the emulated network.

Invariant: a point in the plot is a row in ``results.json``, and a row is one run of ``bench.broadcast_wan`` with the
options in ``config.toml``; rows in which the machine may have been the limit are drawn hollow.

    python experiments/fig4_broadcast/run.py               measure, then draw
    python experiments/fig4_broadcast/run.py --only-draw   draw what was measured
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER / "results.json"
COLOURS = {"star": "tab:red", "chain": "tab:blue", "libtorrent": "tab:green"}
DASHES = ("-", "--", ":")


def main() -> int:
    parser = argparse.ArgumentParser(description="Figure 4 of the paper, measured")
    parser.add_argument("--only-draw", action="store_true", help="draw results.json as it is")
    options = parser.parse_args()
    config = tomllib.loads((FOLDER / "config.toml").read_text())
    if not options.only_draw and (reason := measure(config)):
        print(json.dumps({"skipped": reason}))
        return 0
    draw(json.loads(RESULTS.read_text()))
    return 0


def measure(config: dict[str, Any]) -> str:
    """Write ``results.json``, after every run; return why this machine cannot, or nothing. Runs whose rows are there
    already are not made again."""
    kept = {key: value for key, value in config.items() if key != "series"}
    rows = _rows_so_far(kept)
    for series in config["series"]:
        for workers in config["workers"]:
            done = {row["scheme"] for row in rows if (row["series"], row["workers"]) == (series["label"], workers)}
            if done.issuperset(series["schemes"]):
                continue
            report = _bench(config, series, workers)
            if "skipped" in report:
                return str(report["skipped"])
            rows += [_row(series, workers, scheme, report) for scheme in series["schemes"]]
            RESULTS.write_text(
                json.dumps({"config": kept, "machine": report["machine"], "rows": rows}, indent=1) + "\n"
            )
    return ""


def _rows_so_far(kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a run with the same options that was interrupted."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows: list[dict[str, Any]] = results.get("rows", [])
    return rows if results.get("config") == kept else []


def _bench(config: dict[str, Any], series: dict[str, Any], workers: int) -> dict[str, Any]:
    values = {
        "--workers": workers,
        "--worker-mbps": config["worker_mbps"],
        "--seed-mbps": series.get("uplink", workers) * config["worker_mbps"],
        "--rtt-ms": config["rtt_ms"],
        "--mib": config["mib"],
        "--share": config["share"],
        "--repeat": config["repeat"],
        "--warm-up": series["warm_up"],
    }
    arguments = [str(part) for pair in values.items() for part in pair]
    command = [sys.executable, "-m", "bench.broadcast_wan", *arguments, "--scheme", *series["schemes"]]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _row(series: dict[str, Any], workers: int, scheme: str, report: dict[str, Any]) -> dict[str, Any]:
    result = report["schemes"][scheme]
    return {
        "series": series["label"],
        "scheme": scheme,
        "workers": workers,
        "share_s": result["share_s"],
        "all_s": result["all_s"],
        "bound_share_s": report["bound_share_s"],
        "seed_sent_objects": result["runs"][-1]["seed_sent_objects"],
        "emulator_core_share": max(run["emulator_core_share"] for run in result["runs"]),
        "machine_share": max(run["machine_share"] for run in result["runs"]),
        "inconclusive": result["inconclusive"],
    }


def draw(results: dict[str, Any]) -> None:
    """``fig4.png`` and ``fig4.svg`` beside the results."""
    rcParams["svg.hashsalt"] = "fig4"  # the same results give the same file
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    labels = list(dict.fromkeys(row["series"] for row in results["rows"]))
    for series, scheme in dict.fromkeys((row["series"], row["scheme"]) for row in results["rows"]):
        rows = [row for row in results["rows"] if (row["series"], row["scheme"]) == (series, scheme)]
        counts, times = [row["workers"] for row in rows], [row["share_s"] for row in rows]
        style, colour = DASHES[labels.index(series) % len(DASHES)], COLOURS.get(scheme, "black")
        axes.plot(counts, times, style, color=colour, label=f"{scheme}, {series}")
        for row in rows:
            face = "white" if row["inconclusive"] else colour
            axes.plot(row["workers"], row["share_s"], "o", color=colour, markerfacecolor=face, markersize=5)
    bound_s = min(row["bound_share_s"] for row in results["rows"])
    axes.axhline(bound_s, color="grey", linewidth=0.8, label="$G / B_w$")
    config = results["config"]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="workers",
        ylabel=f"seconds until {config['share']:.0%} of the workers have everything",
        title=f"{config['mib']} MiB, $B_w$ = {config['worker_mbps']:g} Mbit/s, RTT {config['rtt_ms']:g} ms",
    )
    axes.set_xticks(config["workers"], labels=[str(count) for count in config["workers"]])
    axes.minorticks_off()
    ticks = [bound_s * factor for factor in (1, 2, 4, 8)]
    axes.set_yticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
    axes.legend(fontsize=8)
    figure.savefig(FOLDER / "fig4.png", dpi=120, metadata={"Software": None})
    figure.savefig(FOLDER / "fig4.svg", metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
