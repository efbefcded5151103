"""Parity: what is learned under each staleness budget, against steps, hours and USD.

``python experiments/parity/run.py`` warm-starts one model per seed, and trains it with ``echo2 train`` under every mode
(``examples/demo/tiny.toml``), so the modes of a seed begin with the same version 0 and the same prompts. Each result is
a line of ``results.jsonl``, written when its run ends; runs that stand there are not done again, and one that was cut
short goes on. ``summary.json`` and ``parity.svg`` follow from those lines alone.

Accuracy by step is measured. Hours and USD are those of the system that the paper ran under that budget, step for step
(``PRICES``): a tiny model on two cores tells nothing about the time of an 8B one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common, training
from experiments.fig3a_cost import run as fig3a
from matplotlib.axes import Axes
from scipy.stats import t as student

from echo2.report.folder import read_run

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
CONFIG = HERE.parents[1] / "examples/demo/tiny.toml"
STEPS = 96
"""A multiple of every publish period, as is the time between two evaluations."""
COMMON = {"run.steps": STEPS, "eval.every_steps": 12, "eval.prompts": 48, "eval.samples": 8}
BASE = {"run.steps": 1, "rollout.rollouts_per_step": 32, "learning.updates_per_step": 1}
"""The warm start makes version 0; a run has at least one step, whose outcome is left."""
MODES: dict[str, dict[str, Any]] = {
    "sync": {"run.mode": "sync"},
    "async": {"run.mode": "async"},
    "S=3": {"staleness.budget": 3, "staleness.publish_period": 2},
    "S=4": {"staleness.budget": 4, "staleness.publish_period": 3},
    "shared": {
        "run.mode": "sync",
        "workers.local": 0,
        "workers.shared_device": True,
        "rollout.concurrent_groups": 32,
    },
}
"""``shared``: one process that generates and trains in turns, with one copy of the weights."""
FINAL_SAMPLES = 32
"""Replies to each prompt when version 0 and the last version are compared."""
CONFIDENCE = 0.95


class Price(NamedTuple):
    """Of one step of the paper's 8B system."""

    step_s: float
    step_usd: float


def prices() -> dict[str, Price]:
    """By mode: the paper's step times, and what ``experiments/fig3a_cost`` counts for them at the middle prices.

    verl's synchronous system generates and trains in turns on the same GPUs, so it is the price of ``shared``, too.
    """
    found = {}
    for mode, system in {"sync": "verl sync", "async": "verl async", "shared": "verl sync"}.items():
        step_s = fig3a.CENTRAL_STEP_S["8B"][system]
        found[mode] = Price(step_s, step_s / 3600 * fig3a.CENTRAL_GPUS * fig3a.MIDDLE[0])
    for row in common.read(Path(fig3a.__file__).parent)["rows"]:
        if (row["model"], row["rule"]) == ("8B", "overlapped"):
            found[f"S={row['staleness_budget']}"] = Price(row["step_s"], fig3a.usd(row, fig3a.MIDDLE))
    return found


# ---- measuring -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="DIR", default=training.RUNS / "parity", help="kept there")
    parser.add_argument("--seeds", type=int, default=5, help="paired runs of each mode")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no run is begun")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    arguments = parser.parse_args()
    until_s = time.monotonic() + 60 * arguments.minutes
    rows = kept()
    for seed in range(arguments.seeds):
        for mode in arguments.modes:
            if any((row["mode"], row["seed"]) == (mode, seed) for row in rows) or time.monotonic() > until_s:
                continue
            rows.append(common.rounded(measured(mode, seed, arguments.runs.resolve())))
            with RESULTS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            write(rows)
    write(rows)


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def measured(mode: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train the seed's version 0 under the mode; all that is kept of the run."""
    base = training.exported(
        training.trained(CONFIG, folder, {"run.name": f"base-{seed}", "run.seed": seed, **BASE}), version=0
    )
    own = {"run.name": f"{mode.replace('=', '')}-{seed}", "run.seed": seed, "model.path": str(base)}
    run = training.trained(CONFIG, folder, {**COMMON, "model.warm_start_steps": 0, **own, **MODES[mode]})
    final = training.echo2(
        "eval",
        run,
        "--model",
        training.exported(run),
        "--against",
        base,
        *training.overrides({"eval.samples": FINAL_SAMPLES}),
    )
    (compared,) = final["by_task"].values()
    told = read_run(run)
    last = told.metrics[-1]
    return {
        "mode": mode,
        "seed": seed,
        "held_out": [[line.version, line.reward_mean, line.prompts] for line in told.evals],
        "held_out_first": _mean_of(compared["measures_against"]),
        "held_out_last": _mean_of(compared["measures"]),
        "batch_reward": [line.reward_trained_mean for line in told.metrics],
        "staleness_mean": fmean(line.staleness_mean for line in told.metrics),
        "staleness_max": max(line.staleness_max for line in told.metrics),
        "measured_s": last.elapsed_s,
        "measured_bubble_ratio": last.bubble_ratio,
    }


def _mean_of(measures: Mapping[str, Any]) -> float:
    """avg@k, the first of a task's measures."""
    return float(next(iter(measures.values()))["value"])


# ---- what follows from it --------------------------------------------------------------------------------------------


def write(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    found = summary(rows, prices())
    common.write(HERE, found, "summary.json")
    common.draw(HERE / "parity.svg", lambda *axes: paint(axes, rows, prices()), columns=4, width_in=4.2)


def summary(rows: Sequence[Mapping[str, Any]], priced: Mapping[str, Price]) -> dict[str, Any]:
    """modes: means over seeds.  against_sync: differences seed by seed, with Student's interval of their mean."""
    modes = [_mode(mode, of(rows, mode), priced[mode]) for mode in MODES if of(rows, mode)]
    against = [_against(mode, rows, priced) for mode in MODES if mode != "sync" and paired(rows, mode)]
    return {
        "prices": {mode: price._asdict() for mode, price in priced.items()},
        "modes": modes,
        "against_sync": against,
    }


def of(rows: Sequence[Mapping[str, Any]], mode: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["mode"] == mode]


def paired(rows: Sequence[Mapping[str, Any]], mode: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(the mode's run, the synchronous run) of every seed that has both."""
    sync = {row["seed"]: row for row in of(rows, "sync")}
    return [(row, sync[row["seed"]]) for row in of(rows, mode) if row["seed"] in sync]


def _mode(mode: str, own: Sequence[Mapping[str, Any]], price: Price) -> dict[str, Any]:
    return {
        "mode": mode,
        "seeds": len(own),
        "held_out_first": fmean(row["held_out_first"] for row in own),
        "held_out_last": fmean(row["held_out_last"] for row in own),
        "batch_reward_first": fmean(late_reward(row, 12, 12) for row in own),
        "batch_reward_last": fmean(late_reward(row, STEPS, 12) for row in own),
        "staleness_mean": fmean(row["staleness_mean"] for row in own),
        "staleness_max": max(row["staleness_max"] for row in own),
        "hours": STEPS * price.step_s / 3600,
        "usd": STEPS * price.step_usd,
        "measured_s": fmean(row["measured_s"] for row in own),
        "measured_bubble_ratio": fmean(row["measured_bubble_ratio"] for row in own),
    }


def _against(mode: str, rows: Sequence[Mapping[str, Any]], priced: Mapping[str, Price]) -> dict[str, Any]:
    """At equal steps, and at the USD that the cheaper of the two has spent at its end."""
    pairs = paired(rows, mode)
    usd = STEPS * min(priced[mode].step_usd, priced["sync"].step_usd)
    steps, sync_steps = usd / priced[mode].step_usd, usd / priced["sync"].step_usd
    return {
        "mode": mode,
        "seeds": len(pairs),
        "held_out_more": mean_ci([row["held_out_last"] - sync["held_out_last"] for row, sync in pairs]),
        "held_out_more_over_the_run": mean_ci([over_the_run(row, sync) for row, sync in pairs]),
        "batch_reward_more": mean_ci([late_reward(row, STEPS) - late_reward(sync, STEPS) for row, sync in pairs]),
        "equal_usd": usd,
        "steps_at_equal_usd": [steps, sync_steps],
        "held_out_more_at_equal_usd": mean_ci([between(row, steps) - between(sync, sync_steps) for row, sync in pairs]),
        "batch_reward_more_at_equal_usd": mean_ci(
            [late_reward(row, steps) - late_reward(sync, sync_steps) for row, sync in pairs]
        ),
        "usd_less_per_step": 1 - priced[mode].step_usd / priced["sync"].step_usd,
    }


def curve(row: Mapping[str, Any]) -> dict[int, float]:
    """Version → accuracy on held-out sums, version 0 included."""
    return {0: row["held_out_first"], **{version: reward for version, reward, _ in row["held_out"]}}


def between(row: Mapping[str, Any], step: float) -> float:
    """Accuracy on held-out sums at a step, on the line from one evaluation to the next."""
    found = curve(row)
    before = max(version for version in found if version <= step)
    after = min((version for version in found if version > step), default=before)
    share = (step - before) / (after - before) if after > before else 0.0
    return found[before] + share * (found[after] - found[before])


def over_the_run(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """By how much the first run's accuracy is higher, mean over the trained versions that both were evaluated at."""
    mine, theirs = curve(row), curve(other)
    return fmean(mine[version] - theirs[version] for version in mine.keys() & theirs.keys() - {0})


def late_reward(row: Mapping[str, Any], end: float, steps: int = 12) -> float:
    """Mean reward of the last ``steps`` batches before step ``end``."""
    last = round(end)
    return fmean(row["batch_reward"][max(0, last - steps) : last])


def mean_ci(values: Sequence[float]) -> list[float]:
    """[mean, low, high]: Student's interval of the mean; three times the mean for one value."""
    mean = fmean(values)
    if len(values) < 2:
        return [mean, mean, mean]
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return [mean, mean - half, mean + half]


# ---- drawing ---------------------------------------------------------------------------------------------------------


def paint(axes: Sequence[Axes], rows: Sequence[Mapping[str, Any]], priced: Mapping[str, Price]) -> None:
    """Bands: one standard error of the mean over seeds."""
    every = COMMON["eval.every_steps"]
    steps, hours, usd, batch = axes
    for number, mode in enumerate(mode for mode in MODES if of(rows, mode)):
        own, price = of(rows, mode), priced[mode]
        found = [curve(row) for row in own]
        places = sorted(set.intersection(*(set(each) for each in found)))
        curves = [[each[place] for place in places] for each in found]
        for panel, scale in ((steps, 1.0), (hours, price.step_s / 3600), (usd, price.step_usd)):
            band(panel, [scale * place for place in places], curves, mode, number)
        band(batch, range(every, STEPS + 1), [smoothed(row["batch_reward"], every) for row in own], mode, number)
    for panel, x, y in (
        (steps, "training step", "accuracy on held-out sums"),
        (hours, "hours, at the paper's 8B step times", ""),
        (usd, "USD, at the paper's 8B steps and prices", ""),
        (batch, "training step", f"mean reward of the last {every} batches"),
    ):
        panel.set(xlabel=x, ylabel=y)
        panel.legend(fontsize=7)


def band(panel: Axes, xs: Sequence[float], curves: Sequence[Sequence[float]], label: str, number: int) -> None:
    columns = [list(column) for column in zip(*curves, strict=True)]
    means = [fmean(column) for column in columns]
    errors = [stdev(column) / sqrt(len(column)) if len(column) > 1 else 0.0 for column in columns]
    panel.plot(xs, means, color=f"C{number}", label=label)
    low = [mean - error for mean, error in zip(means, errors, strict=True)]
    high = [mean + error for mean, error in zip(means, errors, strict=True)]
    panel.fill_between(xs, low, high, color=f"C{number}", alpha=0.2, linewidth=0)


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """[N] → [N - width + 1] means of ``width`` neighbours."""
    return [fmean(values[place : place + width]) for place in range(len(values) - width + 1)]


if __name__ == "__main__":
    main()
