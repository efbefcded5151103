"""Table 4: final chip change per opponent, of a base model and of the same model trained with GRPO.

``python experiments/table4_poker/run.py`` trains the configuration beside this file for real (coordinator, learner, one
worker), and plays version 0 and the last version on the same held-out deals, from both seats, against the three rule
bots and against version 0 itself, which takes the place of the paper's LLM opponent. ``--runs DIR`` keeps the run
folder, and goes on from one that is there. Results go to ``results.json`` and ``table4.svg``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common
from matplotlib.axes import Axes

from echo2.cli.evaluate import compared
from echo2.cli.inputs import checked_config
from echo2.config.load import build_config
from echo2.run.api import train

HERE = Path(__file__).parent
CONFIG = HERE / "run.toml"
BOTS = ("rock", "maniac", "counter")
FROZEN = "version 0"
DEALS = 50
"""Held-out deals for each opponent; every one is played from both seats."""
MEASURES = ("games", "deals", "gain_per_game", "bb_per_100", "bb_per_100_ci95", "fault_share")
MORE = ("bb_per_100_more", "bb_per_100_more_ci95")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the run folder and models there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.runs or Path(scratch)).resolve()
        base, trained = models(folder)
        results = {"rewards": rewards(folder), "rows": table(folder, base, trained)}
    common.write(HERE, results)
    common.draw(HERE / "table4.svg", lambda left, right: paint(left, right, results), columns=2, width_in=4.5)


def models(folder: Path) -> tuple[Path, Path]:
    """Model directories of version 0 and of the last version of a run that has ended."""
    run = folder / "table4-poker"
    base, trained = folder / "base", folder / "trained"
    if not trained.exists():
        train(checked_config(CONFIG, [f"run.dir={folder}"]), resume=run.exists())
        echo2("export", run, "--version", "0", "-o", base)
        echo2("export", run, "-o", trained)
        echo2("snapshot", "pack", base, "-o", folder / "frozen")
    return base, trained


def rewards(folder: Path) -> list[float]:
    """Mean reward of the games of each training batch."""
    from echo2.report.folder import read_run

    return [line.reward_trained_mean for line in read_run(folder / "table4-poker").metrics]


def table(folder: Path, base: Path, trained: Path) -> list[dict[str, Any]]:
    """A row for each model and opponent; those of the trained model say what it has more on the same deals."""
    frozen = {
        "name": FROZEN,
        "model": "echo2.rollout.frozen:FrozenPolicy",
        "options": {"snapshot": str(folder / "frozen"), "device": "cpu", "threads": 1, "max_tokens": 14},
    }
    tables = checked_config(CONFIG, [f"run.dir={folder}"]).model_dump()
    tables["tasks"][0]["options"]["opponents"] = [*BOTS, frozen]
    tables["eval"]["prompts"] = 2 * DEALS * (len(BOTS) + 1)
    ours, theirs = (
        build_config({**tables, "model": {**tables["model"], "path": str(path)}}) for path in (trained, base)
    )
    found = compared(ours, theirs)["by_task"]["sandbox"]
    rows = [{"model": "base", **{key: line[key] for key in ("opponent", *MEASURES)}} for line in found["table_against"]]
    return rows + [
        {"model": "GRPO", **{key: line[key] for key in ("opponent", *MEASURES, *MORE)}} for line in found["table"]
    ]


def echo2(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "echo2", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def paint(left: Axes, right: Axes, results: dict[str, Any]) -> None:
    left.plot(range(1, len(results["rewards"]) + 1), results["rewards"])
    left.set_xlabel("training step")
    left.set_ylabel("mean reward of the batch, chips")
    for shift, model in ((-0.2, "base"), (0.2, "GRPO")):
        rows = [row for row in results["rows"] if row["model"] == model]
        places = [place + shift for place in range(len(rows))]
        means = [row["bb_per_100"] for row in rows]
        errors = [row["bb_per_100_ci95"][1] - row["bb_per_100"] for row in rows]
        right.bar(places, means, width=0.38, yerr=errors, capsize=3, label=model)
    right.set_xticks(range(len(rows)), [row["opponent"] for row in rows])
    right.set_ylabel("bb/100, 95 % intervals")
    right.axhline(0, color="black", linewidth=0.8)
    right.legend()


if __name__ == "__main__":
    main()
