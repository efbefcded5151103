"""``echo2 status | stop``: what people ask of a running run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo2.cli.output import JsonFlag, print_json, show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from echo2.transport.join import JoinString
    from echo2.transport.messages import Reply, Request, RunStatus

WATCH_S = 2.0
COLUMNS = ("worker", "version", "doing", "rollouts", "per s", "USD/h", "USD", "heard")
RELAY_COLUMNS = ("relay of", "fed by", "can be dialled", "sent on", "re-parented")
"""What brings the worker its snapshots: from whom, whether others can have them from it, how much they had, and how
often it turned to another parent."""
NAMES = frozenset({"worker", "relay of", "fed by"})
COORDINATOR = "coordinator"
_REACHED = {True: "yes", False: "no", None: "unknown"}

Target = Annotated[
    str | None,
    typer.Argument(metavar="[JOIN|DIR]", help="Join string, file that holds it, run folder, or ECHO2_JOIN."),
]


def status(
    target: Target = None,
    as_json: JsonFlag = False,
    watch: Annotated[bool, typer.Option("--watch", help="Renew the table until the run is over.")] = False,
) -> None:
    """Show what a run and its workers are doing."""
    if watch and as_json:
        raise typer.BadParameter("--watch renews a table for people; leave it out with --json")
    if watch:
        _watch(target)
        return
    picture = _picture(target)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(picture))
    else:
        show(_table(picture))


def stop(
    target: Target = None,
    reason: Annotated[str, typer.Option("--reason", help="Kept in the run's events.")] = "asked by echo2 stop",
    as_json: JsonFlag = False,
) -> None:
    """End a run in order: workers drain, the learner writes its checkpoint. Needs the operator's join string."""
    from echo2.errors import Refused, TransportError, UserError
    from echo2.transport.messages import StopRun

    try:
        _ask(target, StopRun(reason))
    except TransportError as error:
        if target is not None and Path(target).is_dir():
            raise TransportError(
                f"the run in {target} is not running, so there is nothing to stop ({error})"
            ) from error
        raise
    except Refused as error:
        raise UserError(f"stopping needs the run folder or its join/operator string, but: {error}") from error
    print_json({"stopping": True, "reason": reason}) if as_json else print("the run is stopping")


def _watch(target: str | None) -> None:
    from rich.live import Live

    from echo2.errors import TransportError

    picture = _picture(target)
    with Live(_table(picture), auto_refresh=False) as live:
        while picture.phase not in ("done", NOT_RUNNING):
            time.sleep(WATCH_S)
            try:
                picture = _picture(target)
            except TransportError:
                return  # the coordinator left with the end of the run
            live.update(_table(picture), refresh=True)


NOT_RUNNING = "not running"


def _picture(target: str | None) -> RunStatus:
    """From the coordinator; from the run folder's files where one is given and no coordinator answers."""
    from echo2.errors import TransportError
    from echo2.transport.messages import GetStatus, RunStatus

    try:
        reply = _ask(target, GetStatus())
    except TransportError:
        if target is None or not Path(target).is_dir():
            raise
        return _left_behind(Path(target))
    assert isinstance(reply, RunStatus)
    return reply


def _ask(target: str | None, request: Request) -> Reply:
    """Send one request, with the credential of an earlier call where there is one."""
    from echo2.errors import TransportError, UserError
    from echo2.transport.join import read_join

    if target is None or not Path(target).is_dir():
        join = read_join(target)
        return asyncio.run(_send(join, _credential_path(str(join)), request))
    from echo2.cli.inputs import run_folder

    folder = run_folder(Path(target))
    try:
        join = read_join(str(folder.join("operator")))
    except UserError:
        raise TransportError(f"no coordinator has run in {folder.root} yet") from None
    return asyncio.run(_send(join, folder.root / "keys" / "operator.credential", request))


async def _send(join: JoinString, credential: Path, request: Request) -> Reply:
    from echo2.transport.client import HttpTransport

    async with HttpTransport(join, credential) as transport:
        await transport.enrol("command line")
        return await transport.call(request)


def _credential_path(join: str) -> Path:
    """One file for each join string, so that looking again does not use the token up."""
    import hashlib
    import os

    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "echo2" / "credentials" / hashlib.sha256(join.encode()).hexdigest()[:32]


def _left_behind(path: Path) -> RunStatus:
    import msgspec

    from echo2.report.folder import read_run
    from echo2.transport.messages import RunStatus
    from echo2.types import Policy

    run = read_run(path)
    last = run.metrics[-1] if run.metrics else None
    counts = ("generated", "trained", "expired", "refused", "buffered", "failed")
    return RunStatus(
        run_id="",
        name=run.name,
        phase=NOT_RUNNING,
        step=last.step + 1 if last else 0,
        steps=int(run.config.get("run", {}).get("steps", 0)),
        policy=Policy(last.policy_incarnation, last.step + 1) if last else None,
        last_metrics=msgspec.to_builtins(last) if last else {},
        counts={name: getattr(last, name) if last else 0 for name in counts},
        workers=(),
        set_aside=tuple(_outcast(worker, told) for worker, told in (last.set_aside if last else {}).items()),
    )


def _outcast(worker_id: str, told: str) -> dict[str, str]:
    name, _, reason = told.partition(": ")
    return {"id": worker_id, "name": name, "reason": reason}


def _table(picture: RunStatus) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from echo2.broadcast.plan.model import SEED

    head = Text(
        f"{picture.name}: {picture.phase}, step {picture.step} of {picture.steps}, policy {picture.policy or '-'}"
    )
    lines: list[RenderableType] = [head, Text(_numbers(picture))]
    lines += [Text(line) for line in _of_tasks(picture)]
    if picture.problem:
        lines.append(Text(picture.problem, style="yellow"))
    lines += [Text(f"set aside: {_name(row)}: {row.get('reason', '')}", style="red") for row in picture.set_aside]
    if picture.workers:
        names = {SEED: COORDINATOR} | {str(row.get("id", "")): _name(row) for row in picture.workers}
        for columns, cells in ((COLUMNS, _cells), (RELAY_COLUMNS, lambda row: _relay_cells(row, names))):
            table = Table(box=None, pad_edge=False)
            for name in columns:  # what is too long for the terminal is a name, never a figure
                table.add_column(name, no_wrap=name not in NAMES, overflow="fold")
            for row in picture.workers:
                table.add_row(*(Text(cell) for cell in cells(row)))
            lines.append(table)
    return Group(*lines)


def _numbers(picture: RunStatus) -> str:
    from echo2.report.progress import usd

    counts = ", ".join(f"{name} {count}" for name, count in picture.counts.items())
    last = picture.last_metrics
    if not last:
        return counts
    seed, workers = last.get("seed_sent_bytes", 0), sum(last.get("sent_bytes_by_node", {}).values())
    checked = picture.rescored.get("checked", 0)
    rescored = f", {checked} rewards scored again, {picture.rescored['differing']} differ" if checked else ""
    worst = max((row["mean_nats"] for row in last.get("audited", {}).values()), default=None)
    audited = "" if worst is None else f", log-probs within {worst:.2g} nats a token"
    relays = f"; sent {_megabytes(seed)} by the coordinator, {_megabytes(workers)} by workers" if seed else ""
    return (
        f"reward {last['reward_mean']:.3f}, staleness {last['staleness_mean']:.1f} (max {last['staleness_max']}), "
        f"bubble {last['bubble_ratio']:.0%}, {usd(last['cost_usd'])}{relays}; {counts}{rescored}{audited}"
    )


def _of_tasks(picture: RunStatus) -> list[str]:
    """A line for each task of a mixture, and for one that says what passes."""
    last = picture.last_metrics
    rewards, rows, passes = (last.get(name) or {} for name in ("reward_by_task", "rows_by_task", "pass_share_by_task"))
    if len(rewards) < 2 and not passes:
        return []
    return [
        f"{task}: reward {reward:.3f}"
        + (f", {passes[task]:.0%} pass" if task in passes else "")
        + f", {rows.get(task, 0)} rows"
        for task, reward in rewards.items()
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    from echo2.report.progress import usd

    return [
        _name(row),
        str(row.get("installed") or "-"),
        str(row.get("state") or "-") if row.get("active", True) else "gone",
        str(row.get("rows", "-")),
        f"{row.get('rate_per_s', 0.0):.2f}",
        f"{row.get('usd_per_h', 0.0):.2f}",
        usd(row.get("cost_usd", 0.0)).removeprefix("$"),
        f"{row.get('last_seen_s', 0.0):.0f} s ago",
    ]


def _relay_cells(row: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    parent = str(row.get("fed_by") or "-")
    return [
        _name(row),
        names.get(parent, parent),
        _REACHED[row.get("reachable")],
        _megabytes(row.get("sent_bytes", 0)),
        str(row.get("reparentings", 0)),
    ]


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("name") or row.get("id", ""))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
