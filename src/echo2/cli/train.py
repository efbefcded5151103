"""``echo2 train``: every program of a run on this machine, watched."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo2.cli.boundary import logging_to
from echo2.cli.output import JsonFlag, SetOption, note, print_json

if TYPE_CHECKING:
    from echo2.config.root import Config
    from echo2.report.progress import Progress
    from echo2.run.api import Run, RunResult

LOOK_S = 1.0
"""Time between two looks at the run."""


def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Configuration file, or a run folder with --resume.")],
    overrides: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in its folder.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key, its value and meaning.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would run, start nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run coordinator, learner and local workers; print a join string for more workers."""
    from echo2.cli.inputs import check_trainable, checked_config
    from echo2.cli.preview import preview, preview_text
    from echo2.cli.torchrun import take_over
    from echo2.config.render import render_config

    ranks = take_over(os.environ)
    if ranks == 0:
        return  # the first of torchrun's processes runs everything
    if run.is_dir() and not resume:
        raise typer.BadParameter(f"{run} is a folder: give a configuration file, or add --resume to continue that run")
    config = checked_config(run, [*([] if ranks is None else [f"learning.ranks={ranks}"]), *(overrides or [])])
    if print_config:
        print_json(config.model_dump(mode="json")) if as_json else print(render_config(config), end="")
    elif dry_run:
        check_trainable(config)
        print_json(preview(config)) if as_json else print(preview_text(preview(config)))
    else:
        check_trainable(config)
        _train(config, resume, as_json)


def _train(config: Config, resume: bool, as_json: bool) -> None:
    from echo2.cli.inputs import check_port
    from echo2.report.html import write_report
    from echo2.report.progress import Progress, summary
    from echo2.run.api import Run

    check_port(config)
    progress = Progress()
    run = Run(config, resume=resume, events=_Shown(progress))
    interrupted = False
    with logging_to(run.folder.root / "logs"), run, progress:
        try:
            result = _watch(run, progress)
        except KeyboardInterrupt:
            interrupted = True
            progress.message("stopping: workers finish their groups, the learner its step (Ctrl-C again: at once)")
            run.stop("interrupted")
            result = run.result()
    report = write_report(result.folder)
    if as_json:
        print_json(_outcome(result, report))
    else:
        print(summary(result.metrics, report))
    if result.stopped:
        note(f"stopped early: {result.stopped}; continue with --resume")
    if interrupted:
        raise typer.Exit(1)


def _watch(run: Run, progress: Progress) -> RunResult:
    """Show the run until it is over."""
    from echo2.errors import Echo2Error

    told = ""
    while not run.is_over:
        join = run.join_string()
        if join and join != told:
            told = join
            progress.message(f"run folder {run.folder.root}")
            progress.message(f"more workers:  echo2 worker '{join}'")
        try:
            status = run.status()
        except Echo2Error:
            time.sleep(LOOK_S)
            continue
        for line in run.new_metrics():
            progress.show(status, line)
        progress.show(status, None)
        time.sleep(LOOK_S)
    return run.result()


def _outcome(result: RunResult, report: Path) -> dict[str, Any]:
    import msgspec

    last = result.metrics[-1] if result.metrics else None
    return {
        "run_folder": result.folder,
        "report": report,
        "steps": len(result.metrics),
        "stopped": result.stopped,
        "reward_mean_first": _mean([line.reward_mean for line in result.metrics[:5]]),
        "reward_mean_last": _mean([line.reward_mean for line in result.metrics[-5:]]),
        "staleness_max": max((line.staleness_max for line in result.metrics), default=None),
        "cost_usd": last.cost_usd if last else 0.0,
        "last_metrics": msgspec.to_builtins(last),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


class _Shown:
    """Events of the supervisor that people should see while the run goes on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def emit(self, kind: str, **fields: Any) -> None:
        if kind == "program_restarted":
            died = f"died of signal {-fields['exit_code']}" if fields["exit_code"] < 0 else "failed"
            self._progress.message(f"{fields['program']} {died} and is started again")
        elif kind == "program_ended" and fields.get("how") != "left":
            self._progress.message(f"{fields['program']} is given up after {fields['restarts']} restarts; see its log")
        elif kind == "stop_unheard":
            self._progress.message(f"the coordinator did not hear the wish to stop: {fields['error']}")
