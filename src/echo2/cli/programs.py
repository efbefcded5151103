"""``echo2 coordinator | learner | worker``: the programs of a run apart, each in the foreground until it leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo2.cli.boundary import logging_to
from echo2.cli.output import SetOption

if TYPE_CHECKING:
    from echo2.run.folder import RunFolder

Place = Annotated[
    Path, typer.Argument(metavar="RUN.toml|DIR", help="Configuration of a new run, or the folder of one that exists.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N instead of what the run's configuration says.")
]
ThreadsOption = Annotated[
    int, typer.Option("--threads", min=0, help="CPU threads; 0 takes all cores that this process may use.")
]


def coordinator(place: Place, overrides: SetOption = None) -> None:
    """Run the coordinator: leases, buffer, snapshots, metrics. Join strings are written to DIR/join."""
    from echo2.coordinator.shell import run_coordinator

    folder = _folder_for(place, overrides or [], listens=True)
    with logging_to(folder.root / "logs"):
        asyncio.run(run_coordinator(folder))


def learner(
    place: Place,
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="JOIN",
            help="Join string, file that holds it, or ECHO2_JOIN in the environment; not needed beside the run.",
        ),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Run the learner: it trains, and resumes from its newest whole checkpoint."""
    from echo2.learner.shell import run_learner

    folder = _folder_for(place, overrides or [], listens=False)
    own = folder.join("learner")
    with logging_to(folder.root / "logs"):
        code = asyncio.run(run_learner(folder.root, str(own) if join is None and own.is_file() else join))
    if code:
        raise typer.Exit(code)


def worker(
    join: Annotated[
        str | None,
        typer.Argument(metavar="[JOIN]", help="Join string, file that holds it, or ECHO2_JOIN in the environment."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of this worker; the host's name by default.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for credential, spool and snapshots; echo2-worker/NAME by default."),
    ] = None,
    device: DeviceOption = None,
    threads: ThreadsOption = 0,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="NAME", help="What generates here, instead of what the run's configuration says."
        ),
    ] = None,
    usd_per_h: Annotated[
        float | None,
        typer.Option(
            "--usd-per-h", min=0, max=1e5, help="What this worker costs, instead of what the run's configuration says."
        ),
    ] = None,
    server: Annotated[
        Path | None,
        typer.Option(
            "--server",
            envvar="ECHO2_SERVER",
            metavar="FILE",
            help="TOML file whose [server] table describes the inference server of this machine.",
        ),
    ] = None,
) -> None:
    """Join a run and generate until it ends; SIGTERM drains."""
    import socket

    from echo2.rollout.engines import check_kind
    from echo2.worker.shell import run_worker

    if engine is not None:
        check_kind(engine)
    called = name or socket.gethostname()
    if not called.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise typer.BadParameter(f"--name must be letters, digits, dots, dashes and underscores, got {called!r}")
    if usd_per_h is not None and usd_per_h != usd_per_h:
        raise typer.BadParameter("--usd-per-h must be a number, got nan")
    asyncio.run(
        run_worker(join, called, folder or Path("echo2-worker") / called, device, threads, usd_per_h, engine, server)
    )


def _folder_for(place: Path, overrides: list[str], *, listens: bool) -> RunFolder:
    """The run folder of ``place``; a configuration file makes a new one, once everything it names was checked."""
    from echo2.cli.inputs import check_port, checked_config, run_folder
    from echo2.run.folder import RunFolder

    if place.is_dir():
        if overrides:
            raise typer.BadParameter("--set needs a configuration file; a run folder keeps what it began with")
        return run_folder(place)
    config = checked_config(place, overrides)
    if listens:
        check_port(config)
    folder = RunFolder.of(config)
    folder.prepare(config, resume=folder.is_used)
    return folder
