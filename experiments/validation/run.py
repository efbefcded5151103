"""The simulator's prediction beside real runs: bubble ratio, steps per minute, staleness.

``python experiments/validation/run.py`` runs each case of ``config.toml`` for real (learner and engine only take time),
measures its speeds, plays a scenario at those speeds, and compares. It writes ``results.json`` and ``validation.svg``
beside this file, unless only some cases were asked for, and ends with 1 when a prediction missed. ``--real RUNDIR``
compares a run that is there already, for information.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from echo2.config.load import build_config
from echo2.errors import Echo2Error, UserError
from echo2.metrics import StepMetrics
from echo2.report.folder import read_run
from echo2.run.api import Run
from echo2.simulation.compared import Bounds, Comparison, compare, figures
from echo2.simulation.measured import Speeds, scenario_of, speeds
from echo2.simulation.play import play
from echo2.simulation.scenario import build_scenario

HERE = Path(__file__).parent
MOST_WARM_UP = 0.25
"""Of a run's steps that are left out, where it is shorter than the cases are."""


class Case(NamedTuple):
    name: str
    speeds: Speeds
    comparison: Comparison
    real: Sequence[StepMetrics]
    predicted: Sequence[StepMetrics]
    """Of the first seed."""


def main() -> int:
    plan = tomllib.loads((HERE / "config.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(plan["cases"]), help="this one only; may be repeated")
    parser.add_argument("--real", type=Path, metavar="RUNDIR", help="compare this run; its bounds are not enforced")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="keep run folders there; those there are not run again"
    )
    parser.add_argument("--out", type=Path, help="folder for results.json and validation.svg")
    arguments = parser.parse_args()
    bounds = msgspec.convert(plan["bounds"], Bounds)
    if arguments.real is not None:
        report([compared(arguments.real.name, arguments.real, plan, bounds)], bounds)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        kept = arguments.runs or Path(scratch)
        cases = [
            compared(name, real(name, plan, kept), plan, bounds)
            for name in plan["cases"]
            if not arguments.case or name in arguments.case
        ]
    report(cases, bounds)
    if out := arguments.out or (None if arguments.case else HERE):
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps([as_json(case) for case in cases], indent=1) + "\n")
        draw(cases, out / "validation.svg")
    return int(any(case.comparison.missed for case in cases))


def real(name: str, plan: Mapping[str, Any], runs: Path) -> Path:
    """The folder of the case's run, once it has ended. Raises UserError when one is there that did not end."""
    tables = merged(plan["common"], plan["cases"][name])
    steps = tables["run"]["steps"]
    if (runs / name).exists():
        if len(read_run(runs / name).metrics) < steps:
            raise UserError(
                f"{runs / name} must hold a run of {steps} steps, it ended before; remove it to run it again"
            )
        return runs / name
    tables["run"] |= {"name": name, "dir": str(runs)}
    with Run(build_config(tables, check_places=False)) as run:
        for line in run:
            print(f"\r{name}: step {line.step + 1} of {steps}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return run.folder.root


def compared(name: str, folder: Path, plan: Mapping[str, Any], bounds: Bounds) -> Case:
    found = read_run(folder)
    warm_up_steps = min(plan["warm_up_steps"], int(MOST_WARM_UP * len(found.metrics)))
    measured = speeds(found.metrics, found.events, warm_up_steps)
    played = []
    for seed in plan["seeds"]:
        tables = scenario_of(found.config, measured, seed=seed, warm_up_steps=warm_up_steps)
        played.append(play(build_scenario(tables, base=folder)).run.metrics)
    result = compare(figures([found.metrics], warm_up_steps), figures(played, warm_up_steps), bounds)
    return Case(name, measured, result, found.metrics, played[0])


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in below.items()}
    for key, value in above.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


# ---- showing ---------------------------------------------------------------------------------------------------------


def report(cases: Sequence[Case], bounds: Bounds) -> None:
    heads = ("", "bubble ratio", "", "off", "steps/min", "", "off", "staleness off", "missed")
    rows = [heads, ("case", "real", "predicted", "", "real", "predicted", "", "", "")]
    for case in cases:
        real, predicted, off = case.comparison.real, case.comparison.predicted, case.comparison.off
        bubbles = f"{real.bubble_ratio:.3f}", f"{predicted.bubble_ratio:.3f}", f"{off.bubble_ratio:.3f}"
        speed = f"{real.steps_per_min:.2f}", f"{predicted.steps_per_min:.2f}", f"{off.steps_per_min:.1%}"
        missed = ", ".join(case.comparison.missed) or "none"
        rows.append((case.name, *bubbles, *speed, f"{off.staleness:.3f}", missed))
    allowed = f"{bounds.bubble_ratio:g}", f"{bounds.steps_per_min:.0%}", f"{bounds.staleness:g}"
    rows.append(("may be off by", "", "", allowed[0], "", "", allowed[1], allowed[2], ""))
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    for name, measured, *_ in cases:
        print(f"\n{name}, as measured")
        for key, value in msgspec.to_builtins(measured).items():
            print(f"  {key:<18} {shown(value)}")


def shown(value: Any) -> str:
    if isinstance(value, dict) and "median_s" in value:
        return f"{value['median_s']:.3f} s, sigma {value['spread']:.3f} ({value['count']})"
    if isinstance(value, dict):
        return "; ".join(f"{name} {shown(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def as_json(case: Case) -> dict[str, Any]:
    told = {"speeds": msgspec.to_builtins(case.speeds), **msgspec.to_builtins(case.comparison)}
    return {"case": case.name, **rounded(told)}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def draw(cases: Sequence[Case], path: Path) -> None:
    figure = Figure(figsize=(9, 2.6 * len(cases)), layout="constrained")
    grid = figure.subplots(len(cases), 2, squeeze=False)
    for (steps, ages), case in zip(grid, cases, strict=True):
        draw_steps(steps, case)
        draw_ages(ages, case.comparison)
    figure.savefig(path)


def draw_steps(axes: Axes, case: Case) -> None:
    for lines, label, style in ((case.real, "real", "-"), (case.predicted, "predicted", "--")):
        minutes = [(line.elapsed_s - lines[0].elapsed_s) / 60 for line in lines]
        axes.plot(minutes, range(1, len(lines) + 1), style, label=label)
    axes.set_title(case.name, fontsize=9)
    axes.set_xlabel("minutes after the first step")
    axes.set_ylabel("steps")
    axes.legend(loc="lower right", fontsize=8)


def draw_ages(axes: Axes, result: Comparison) -> None:
    for shift, figures_of, label in ((-0.2, result.real, "real"), (0.2, result.predicted, "predicted")):
        ages = figures_of.staleness
        axes.bar([int(age) + shift for age in ages], list(ages.values()), width=0.38, label=label)
    axes.set_xticks(sorted({int(age) for age in (*result.real.staleness, *result.predicted.staleness)}))
    axes.set_xlabel("staleness, training steps")
    axes.set_ylabel("share of trajectories")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Echo2Error, ValueError) as error:
        sys.exit(f"validation: {error}")
