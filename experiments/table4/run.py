"""Table 4: final chip change per opponent, before and after training, and with a mixture of opponents.

``python experiments/table4/run.py`` makes a base model by a warm start, trains it twice (against itself, frozen,
which takes the place of the paper's LLM opponent, and against a mixture of that and three bots), and plays every model
on the same held-out deals, from both seats, against all four. Runs lie in ``--runs DIR`` and go on from where they
ended; ``results.json`` and ``table4.svg`` are written after each condition and seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common, training
from matplotlib.axes import Axes

from echo2.cli.evaluate import loaded, scored
from echo2.cli.inputs import checked_config
from echo2.data.sandbox.table import Game, compare, games_of

HERE = Path(__file__).parent
CONFIG = HERE / "run.toml"
BOTS = ("rock", "maniac", "counter")
FROZEN = "the base"
"""What the frozen base model is called as an opponent."""
CONDITIONS: dict[str, tuple[str, ...]] = {"self": (FROZEN,), "mixed": (*BOTS, FROZEN)}
"""Whom a model is trained against."""
BASE = {"run.name": "base", "run.steps": 1, "rollout.rollouts_per_step": 8, "learning.updates_per_step": 1}
"""The warm start makes version 0; a run has at least one step, whose outcome is left."""
SEATS, MEASURE = 2, ("bb_per_100", 50.0)
"""100 hands in big blinds of two chips."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="DIR", default=training.RUNS / "table4", help="kept there")
    parser.add_argument("--seeds", type=int, default=1, help="training runs of each condition")
    parser.add_argument("--deals", type=int, default=50, help="held-out deals for each opponent")
    arguments = parser.parse_args()
    folder = arguments.runs.resolve()
    base = training.exported(training.trained(CONFIG, folder, BASE), version=0)
    frozen = folder / "frozen"
    if not frozen.exists():
        training.echo2("snapshot", "pack", base, "-o", frozen)
    games: dict[str, list[list[Game]]] = {"base": [played(base, frozen, arguments.deals, folder)]}
    curves: dict[str, list[list[float]]] = {}
    write(games, curves)
    for seed in range(arguments.seeds):
        for condition, names in CONDITIONS.items():
            settings = {
                "run.name": f"{condition}-{seed}",
                "run.seed": seed,
                "model.path": str(base),
                "model.warm_start_steps": 0,
                "tasks.0.options.opponents": opponents(names, frozen),
            }
            run = training.trained(CONFIG, folder, settings)
            model = training.exported(run)
            curves.setdefault(condition, []).append(training.rewards(run))
            games.setdefault(condition, []).append(played(model, frozen, arguments.deals, folder))
            write(games, curves)


def opponents(names: Sequence[str], frozen: Path) -> list[str | dict[str, Any]]:
    """The option of that name: bots by name, the base as a model that plays from a packed snapshot."""
    model = {
        "name": FROZEN,
        "model": "echo2.rollout.frozen:FrozenPolicy",
        "options": {"snapshot": str(frozen), "device": "cpu", "threads": 1, "max_tokens": 14},
    }
    return [model if name == FROZEN else name for name in names]


def played(model: Path, frozen: Path, deals: int, folder: Path) -> list[Game]:
    """Games of a model against all four on the held-out deals; kept beside the runs, and played once."""
    kept = folder / f"{model.name}.{deals}.games.json"
    if not kept.exists():
        config = checked_config(
            CONFIG,
            [
                f"model.path={model}",
                f"tasks.0.options.opponents={training.toml(opponents((*BOTS, FROZEN), frozen))}",
                f"eval.prompts={SEATS * deals * (len(BOTS) + 1)}",
            ],
        )
        found = scored(config, loaded(config))["sandbox"]
        kept.write_bytes(msgspec.json.encode(games_of(found.played)))
    return msgspec.json.decode(kept.read_bytes(), type=list[Game])


def write(games: Mapping[str, Sequence[Sequence[Game]]], curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    results = {**tables(games), "rewards": curves}
    common.write(HERE, results)
    common.draw(HERE / "table4.svg", lambda left, right: paint(left, right, results), columns=2, width_in=4.8)


def tables(games: Mapping[str, Sequence[Sequence[Game]]]) -> dict[str, Any]:
    """rows: by condition, all seeds together; a deal's worth is its mean over them.  by_seed: each on its own."""
    (base,) = games["base"]
    by_seed = [
        {"trained_against": name, "seed": seed, **row}
        for name, runs in games.items()
        for seed, run in enumerate(runs)
        for row in _rows(run, None if name == "base" else base)
    ]
    rows = [
        {"trained_against": name, "seeds": len(runs), **row}
        for name, runs in games.items()
        for row in _rows([game for run in runs for game in run], None if name == "base" else base)
    ]
    shares = {name: fault_share([game for run in runs for game in run]) for name, runs in games.items()}
    return {"rows": rows, "by_seed": by_seed, "fault_share": shares}


def _rows(games: Sequence[Game], base: Sequence[Game] | None) -> list[dict[str, Any]]:
    return compare(games, SEATS, *MEASURE, against=base)


def fault_share(games: Sequence[Game]) -> float:
    """Share of all replies that were no action."""
    return sum(game.faults for game in games) / sum(game.replies for game in games)


def paint(left: Axes, right: Axes, results: Mapping[str, Any]) -> None:
    for number, (condition, runs) in enumerate(results["rewards"].items()):
        for run in runs:
            label = f"trained against {condition}" if run is runs[0] else None
            left.plot(range(1, len(run) + 1), run, color=f"C{number + 1}", alpha=0.7, label=label)
    left.set_xlabel("training step")
    left.set_ylabel("mean reward of the batch, chips")
    if results["rewards"]:
        left.legend()
    columns = [*BOTS, FROZEN]
    models = list(dict.fromkeys(row["trained_against"] for row in results["rows"]))
    for number, model in enumerate(models):
        rows = [
            row
            for name in columns
            for row in results["rows"]
            if (row["trained_against"], row["opponent"]) == (model, name)
        ]
        errors = [row["bb_per_100_ci95"][1] - row["bb_per_100"] for row in rows]
        places = [place + 0.2 * (number - (len(models) - 1) / 2) for place in range(len(rows))]
        right.bar(
            places,
            [row["bb_per_100"] for row in rows],
            width=0.19,
            yerr=errors,
            capsize=2,
            label=model,
            color=f"C{number}",
        )
    right.set_xticks(range(len(columns)), columns)
    right.set_ylabel("bb/100, 95 % intervals")
    right.axhline(0, color="black", linewidth=0.8)
    right.legend()


if __name__ == "__main__":
    main()
