"""``echo2 simulate``: a run in virtual time, by the production programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo2.cli.output import JsonFlag, SetOption, note, print_json, show

if TYPE_CHECKING:
    from echo2.metrics import StepMetrics
    from echo2.simulation.play import Played
    from echo2.simulation.scenario import Scenario


def simulate(
    path: Annotated[Path, typer.Argument(metavar="SCENARIO", help="Scenario file, see docs/simulation.md.")],
    overrides: SetOption = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Instead of the scenario's world.seed.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write metrics, events and report.html of the run there."),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Simulate also what no pool can keep busy, and say so.")
    ] = False,
    print_scenario: Annotated[
        bool, typer.Option("--print-scenario", help="Print the whole scenario, every key with its meaning, and exit.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Play a run in virtual time: bubble, staleness, cost and dissemination of fleets that nobody paid for yet."""
    from echo2.simulation.scenario import read_scenario

    scenario = read_scenario(path, [*(overrides or []), *([] if seed is None else [f"world.seed={seed}"])])
    if print_scenario:
        _print(scenario, as_json)
        return
    warnings = _checked(scenario, out, anyway=anyway)
    played = _played(scenario)
    warnings += played.missed
    if out is not None:
        _write(scenario, played, out)
    if as_json:
        print_json(_facts(scenario, played, warnings))
    else:
        _show(scenario, played, warnings, out)


def _print(scenario: Scenario, as_json: bool) -> None:
    import tomllib

    from echo2.simulation.scenario import render_scenario

    text = render_scenario(scenario)
    if as_json:
        print_json(tomllib.loads(text))
    else:
        print(text, end="")


def _checked(scenario: Scenario, out: Path | None, *, anyway: bool) -> list[str]:
    """Before minutes are spent: that there is a place for what comes of it, and that something can come of it."""
    from echo2.errors import UserError

    why = scenario.impossible()
    if why and not anyway:
        raise UserError(f"no pool can keep the learner of this scenario busy: {why}; --anyway plays it all the same")
    if out is not None:
        _make_room(out)
    return [f"no pool can keep the learner busy: {why}"] if why else []


def _make_room(out: Path) -> None:
    from echo2.errors import UserError

    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        raise UserError(f"{out} must be a folder that can be written, but: {error.strerror}") from error
    if taken:
        raise UserError(f"{out} must be a new or an empty folder: what lies there is not overwritten")


def _played(scenario: Scenario) -> Played:
    from echo2.simulation.play import play

    with _progress(scenario.config.run.steps) as on_step:
        return play(scenario, on_step)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[StepMetrics], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from echo2.report.progress import duration

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=steps)

        def on_step(line: StepMetrics) -> None:
            told = f"{duration(line.elapsed_s)} simulated"
            progress.update(bar, completed=line.step + 1, description=told)

        yield on_step


def _facts(scenario: Scenario, played: Played, warnings: list[str]) -> dict[str, object]:
    import msgspec

    return {
        "scenario": scenario.name,
        "seed": scenario.world.seed,
        **msgspec.to_builtins(played.outcome),
        "warnings": warnings,
    }


def _write(scenario: Scenario, played: Played, out: Path) -> None:
    """A run folder, as a real run leaves one: ``echo2 plan`` and the report read it."""
    from echo2.report.html import write_report
    from echo2.simulation.folder import write_folder

    write_folder(scenario, played.run, out)
    write_report(out)


def _show(scenario: Scenario, played: Played, warnings: list[str], out: Path | None) -> None:
    from echo2.cli.simulate_view import view

    for warning in warnings:
        note(f"echo2: {warning}")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    show(view(scenario, played.outcome, plain=not encoding.lower().startswith("utf")))
    if out is None:
        note("-o DIR writes report.html with the plots and the timeline, metrics.jsonl and events.jsonl.")
    else:
        note(f"report {out / 'report.html'}")
