"""How much of a policy changes between two publishes, and what sending only that costs: measured in real runs.

``python experiments/deltas/run.py`` trains each case for a few steps (about fifteen minutes in all on two CPU cores)
and writes ``results.json`` and ``deltas.svg`` beside this file. kappa = 2 and two updates per step: four optimizer
updates lie between two publishes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples" / "demo"
COMMON = ("staleness.budget=3", "staleness.publish_period=2", "learning.updates_per_step=2", "workers.local=1",
          "metrics.transcripts_per_step=0")  # fmt: skip


class Case(NamedTuple):
    name: str
    config: str
    settings: tuple[str, ...]


def cases(steps: int) -> list[Case]:
    small = (f"run.steps={steps}", "rollout.rollouts_per_step=32", "rollout.group_size=8", "checkpoint.keep=1")
    return [
        Case(f"{model} {dtype}, lr {lr}", config, (*small, f"learning.lr={lr}", f"model.snapshot_dtype={dtype}"))
        for model, config, dtypes in (
            ("tiny Qwen3, 0.4M", "tiny.toml", ("bfloat16", "float32")),
            ("SmolLM2-135M", "demo.toml", ("bfloat16",)),
        )
        for dtype in dtypes
        for lr in ("1e-6", "1e-5")
    ]


def run(case: Case, folder: Path) -> list[dict[str, Any]]:
    """One line per publish that was sent as a delta, or would have been."""
    settings = [f"--set={setting}" for setting in (f"run.dir={folder}", *COMMON, *case.settings)]
    command = [sys.executable, "-m", "echo2", "train", str(EXAMPLES / case.config), *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (metrics,) = folder.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    publishes: list[dict[str, Any]] = []
    for line in lines:
        seen = {key: line[key] for key in ("changed_share", "publish_bytes", "snapshot_bytes")}
        if seen["changed_share"] is not None and (
            not publishes or publishes[-1] != {"step": publishes[-1]["step"], **seen}
        ):
            publishes.append({"step": line["step"], **seen})
    return publishes


def summary(publishes: list[dict[str, Any]]) -> dict[str, float]:
    changed = [publish["changed_share"] for publish in publishes]
    sent = [publish["publish_bytes"] / publish["snapshot_bytes"] for publish in publishes]
    return {
        "publishes": len(publishes),
        "changed_percent_median": round(100 * statistics.median(changed), 4),
        "changed_percent_most": round(100 * max(changed), 4),
        "sent_percent_median": round(100 * statistics.median(sent), 4),
        "sent_percent_most": round(100 * max(sent), 4),
        "snapshot_bytes": publishes[-1]["snapshot_bytes"],
    }


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for name, result in results.items():
        publishes = result["publishes"]
        numbers = range(1, len(publishes) + 1)
        axes[0].plot(numbers, [100 * p["changed_share"] for p in publishes], marker="o", markersize=3, label=name)
        axes[1].plot(
            numbers, [100 * p["publish_bytes"] / p["snapshot_bytes"] for p in publishes], marker="o", markersize=3
        )
    for axis, title in zip(axes, ("elements changed, %", "bytes sent, % of the whole snapshot"), strict=True):
        axis.set(xlabel="publish (four updates each)", title=title, yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps per case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    path = HERE / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if options.only and path.exists() else {}
    for case in cases(options.steps):
        if options.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            publishes = run(case, Path(folder))
        results[case.name] = {"summary": summary(publishes), "publishes": publishes}
        print(case.name, json.dumps(results[case.name]["summary"]), flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, HERE / "deltas.svg")


if __name__ == "__main__":
    main()
