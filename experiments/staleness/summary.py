"""What the runs say: final rewards against on-policy ones of the same seed, and whether an objective holds.

Invariant: pure but for ``write``. A comparison is between runs of one seed, which begin with the same weights and see
the same prompts in the same order; an interval is over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments import common
from experiments.staleness.cells import CHOSEN_WITH, CONTENDERS, METHODS, PAPER, REFERENCE, Cell
from experiments.staleness.results import Line, cell_of, final
from experiments.staleness.tasks import TASKS
from matplotlib.axes import Axes

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of a two-sided 95 % interval, for 2 to 10 seeds."""
TABLE_MARK = "<!-- the table of --summary -->"
CURVES = (0, 3, 6, 11, 20)
"""Ages whose curves are drawn."""
Row = dict[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Of the mean, after Student; None below two values."""
    if len(values) < 2:
        return None
    half = T_95[min(len(values) - 2, len(T_95) - 1)] * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def table(lines: Iterable[Line]) -> list[Row]:
    """A row for each task, method and staleness."""
    runs = {cell_of(line): line for line in lines}
    finals = {cell: final(line) for cell, line in runs.items()}
    rows = []
    for task in TASKS:
        for method in METHODS:
            for staleness in sorted({cell.staleness for cell in runs}):
                seeds = sorted(c.seed for c in runs if c[:3] == (task, method, staleness))
                if seeds:
                    rows.append(_row(runs, finals, task, method, staleness, seeds))
    return rows


def _row(
    runs: Mapping[Cell, Line], finals: Mapping[Cell, float], task: str, method: str, staleness: int, seeds: list[int]
) -> Row:
    own = [Cell(task, method, staleness, seed) for seed in seeds]

    def change(against: Cell, base: Cell) -> list[float]:
        """Final reward minus that of another method or age with the same seed, in parts of a third's, the base's."""
        pairs = [(cell, against._replace(seed=cell.seed), base._replace(seed=cell.seed)) for cell in own]
        return [
            (finals[cell] - finals[other]) / finals[part]
            for cell, other, part in pairs
            if other in finals and finals.get(part)
        ]

    on_policy, itself = Cell(task, REFERENCE, 0, 0), Cell(task, method, 0, 0)
    against = {
        "change": change(on_policy, on_policy),
        "own_change": change(itself, itself),
        "change_from_default": change(Cell(task, REFERENCE, staleness, 0), on_policy),
    }
    return {
        "task": task,
        "method": method,
        "staleness": staleness,
        "seeds": len(seeds),
        "initial": fmean(runs[cell]["rewards"]["0"] for cell in own),
        "final": fmean(finals[cell] for cell in own),
        "worst": min(finals[cell] for cell in own),
        **{name: fmean(values) if values else None for name, values in against.items()},
        **{f"{name}_ci95": interval(values) for name, values in against.items()},
        "lost": sum(finals[cell] < runs[cell]["rewards"]["0"] for cell in own),
        "not_finite": sum(not runs[cell]["finite"] for cell in own),
    }


def judged(rows: Iterable[Row]) -> list[Row]:
    """Of every method, whether it does what a default should, on both tasks; None where runs are missing.

    A method that costs nothing at S = 3 is one whose interval there reaches on-policy. Two seeds judge nothing.
    """
    found = {(row["task"], row["method"], row["staleness"]): row for row in rows}
    verdicts = []
    for method in METHODS:
        verdict: Row = {"method": method}
        for staleness, holds in HOLDS.items():
            own = [found.get((task, method, staleness)) for task in TASKS]
            verdict[f"S={staleness}"] = _all(None if row is None or row["seeds"] < 3 else holds(row) for row in own)
        verdict["meets_the_goal"] = _all(verdict[f"S={staleness}"] for staleness in HOLDS)
        verdicts.append(verdict)
    return verdicts


HOLDS: Mapping[int, Callable[[Row], bool]] = {
    3: lambda row: row["change_ci95"][1] >= 0,
    11: lambda row: row["change"] >= -0.05 and row["change_ci95"][0] >= -0.10,
    20: lambda row: row["change"] >= -0.10,
}


def _all(values: Iterable[bool | None]) -> bool | None:
    known = list(values)
    if False in known:
        return False
    return None if None in known else True


def markdown(rows: Iterable[Row], methods: Iterable[str] = METHODS) -> str:
    """The table of the README: the change against on-policy ``grpo`` in per cent, with its interval."""
    found = {(row["task"], row["method"], row["staleness"]): row for row in rows}
    columns = sorted({staleness for *_, staleness in found})
    text = ["| task | method | " + " | ".join(f"S = {s}" for s in columns) + " |", "|---|---|" + "---|" * len(columns)]
    for task in TASKS:
        for method in methods:
            shown = [_shown(found.get((task, method, staleness))) for staleness in columns]
            if any(shown):
                text.append(f"| {task} | {method} | " + " | ".join(shown) + " |")
    return "\n".join(text)


def _shown(row: Row | None) -> str:
    if row is None or row["change"] is None:
        return ""
    percent = f"{100 * row['change']:+.0f}"
    low, high = row["change_ci95"] or (None, None)
    if low is None or high is None or row["seeds"] < 3:  # two seeds: an interval after Student says nothing
        return f"{percent} ({row['seeds']} seed{'s' * (row['seeds'] > 1)})"
    return f"{percent} ({100 * low:+.0f} to {100 * high:+.0f})" if low != high else percent


def sums(lines: Sequence[Line]) -> dict[str, Any]:
    """What is committed. Judged without the seed with which the setting and the contenders were chosen."""
    unseen = [line for line in lines if line["seed"] != CHOSEN_WITH]
    return {"runs": len(lines), "judged": judged(table(unseen)), "rows": table(lines)}


def with_table(text: str, shown: str) -> str:
    """The document with what stands between its two marks replaced."""
    before, _, rest = text.partition(TABLE_MARK)
    _, _, after = rest.partition(TABLE_MARK)
    return f"{before}{TABLE_MARK}\n\n{shown}\n\n{TABLE_MARK}{after}"


def write(folder: Path, lines: Sequence[Line]) -> None:
    rows = table(lines)
    common.write(folder, sums(lines), "summary.json")
    readme = folder / "README.md"
    readme.write_text(with_table(readme.read_text(), markdown(rows)))
    common.draw(folder / "final.svg", lambda *axes: paint_final(axes, rows), columns=len(TASKS), width_in=4.8)
    for task in TASKS:
        common.draw(
            folder / f"{task}.svg",
            lambda *axes, task=task: paint_curves(axes, task, lines),
            columns=len(CONTENDERS),
            width_in=4.2,
        )


def paint_final(axes: Sequence[Axes], rows: Sequence[Row]) -> None:
    for each, task in zip(axes, TASKS, strict=True):
        for number, method in enumerate(METHODS):
            own = [row for row in rows if (row["task"], row["method"]) == (task, method) and row["change"] is not None]
            wide = method in CONTENDERS
            each.plot(
                [row["staleness"] for row in own],
                [100 * row["change"] for row in own],
                marker="o" if wide else ".",
                linewidth=2 if wide else 0.8,
                linestyle="-" if wide else ":",
                color=f"C{number}" if number < 10 else "black",
                label=method,
            )
            if wide:
                sure = [row for row in own if row["change_ci95"] and row["seeds"] > 2]
                each.fill_between(
                    [row["staleness"] for row in sure],
                    [100 * row["change_ci95"][0] for row in sure],
                    [100 * row["change_ci95"][1] for row in sure],
                    color=f"C{number}",
                    alpha=0.15,
                )
        each.axhspan(-5, 5, color="grey", alpha=0.2)
        each.set_title(task)
        each.set_xlabel("S, age of every batch in steps")
        each.set_ylabel("final reward against on-policy grpo, %")
    axes[0].legend(fontsize=7, loc="lower left")


def paint_curves(axes: Sequence[Axes], task: str, lines: Sequence[Line]) -> None:
    for each, method in zip(axes, CONTENDERS, strict=True):
        for number, staleness in enumerate(CURVES):
            own = [
                line["rewards"] for line in lines if cell_of(line)[:3] == (task, _alike(method, staleness), staleness)
            ]
            points = curve(own)
            if points:
                versions, means, lows, highs = zip(*points, strict=True)
                each.plot(versions, means, color=f"C{number}", label=f"S = {staleness} ({len(own)} seeds)")
                each.fill_between(versions, lows, highs, color=f"C{number}", alpha=0.15, linewidth=0)
        each.set_title(f"{task}: {method}")
        each.set_xlabel("version")
        each.set_ylabel("held-out reward")
        each.set_ylim(0, 1)
        each.legend(fontsize=7, loc="upper left")


def _alike(method: str, staleness: int) -> str:
    """The paper's form is the default at age 0."""
    return REFERENCE if (method, staleness) == (PAPER, 0) else method


def curve(rewards: Sequence[Mapping[str, float]]) -> list[tuple[int, float, float, float]]:
    """(version, mean over seeds, its interval) of the versions that every seed evaluated; no interval below 3 seeds."""
    if not rewards:
        return []
    points = []
    for version in sorted(set.intersection(*({int(version) for version in one} for one in rewards))):
        values = [one[str(version)] for one in rewards]
        low, high = interval(values[:0] if len(values) < 3 else values) or (fmean(values), fmean(values))
        points.append((version, fmean(values), low, high))
    return points
