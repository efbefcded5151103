"""What the experiments in virtual time share: varying a scenario, rounding, results on disk, a figure.

Invariant (I10): an experiment run again gives the committed bytes. Nothing here reads a clock; numbers are rounded so
that the last bit of a double, which may differ between machines, is not in them.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from echo2.config.override import Override, apply_override
from echo2.simulation.play import Played, play
from echo2.simulation.scenario import build_scenario

Case = TypeVar("Case")
Row = dict[str, Any]
SIGNIFICANT = 5
"""Digits kept."""


def scenario(folder: Path, name: str = "scenario.toml") -> dict[str, Any]:
    """Tables of the experiment's scenario file."""
    return tomllib.loads((folder / name).read_text())


def varied(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same with some keys set, in the form ``staleness.budget`` or ``workers.0.count``."""
    changed = copy.deepcopy(dict(tables))
    for name, value in settings.items():
        fault = apply_override(changed, Override(tuple(name.split(".")), value))
        assert fault is None, fault
    return changed


def played(tables: Mapping[str, Any], settings: Mapping[str, Any] = {}) -> Played:
    return play(build_scenario(varied(tables, settings)))


def rounded(value: Any) -> Any:
    """For JSON: floats to a few digits, in whatever they stand."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    if isinstance(value, msgspec.Struct):
        return rounded(msgspec.to_builtins(value))
    return value


def rows(row: Callable[[Case], Row], cases: Iterable[Case]) -> list[Row]:
    """A row for each case; each is shown as it comes."""
    found = []
    for case in cases:
        found.append(rounded(row(case)))
        print(json.dumps(found[-1]), flush=True)
    return found


def write(folder: Path, results: Mapping[str, Any], name: str = "results.json") -> None:
    (folder / name).write_text(json.dumps(rounded(results), indent=1) + "\n")


def read(folder: Path, name: str = "results.json") -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / name).read_text())
    return results


def draw(
    path: Path, paint: Callable[..., None], columns: int = 1, width_in: float = 6.0, height_in: float = 4.0
) -> None:
    """An SVG whose bytes follow from what is painted alone.  paint: given the axes, one argument for each column."""
    rcParams["svg.hashsalt"] = path.stem
    figure = Figure(figsize=(width_in * columns, height_in), layout="constrained")
    axes: list[Axes] = [figure.add_subplot(1, columns, column) for column in range(1, columns + 1)]
    paint(*axes)
    for each in axes:
        each.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
