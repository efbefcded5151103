"""``report.html``: one file that shows a run, without a network or a script.

Invariant: everything that came from a model, a task, a worker or a configuration reaches the page through the
template's escaping; the only markup that passes unescaped is what this package drew. The page forbids scripts and
remote content to whoever opens it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from echo2.durable import write_file
from echo2.metrics import StepMetrics
from echo2.report.charts import charts
from echo2.report.folder import RunFolder, read_run
from echo2.report.progress import duration, usd
from echo2.report.tables import Table, audit_table, set_aside_table, tasks_table
from echo2.report.timeline import timeline_chart
from echo2.report.visible import visible
from echo2.transport.messages import RunStatus

EVENTS_SHOWN = 200
EVENT_CHARACTERS = 400
"""Of one event's fields."""

PAYEES_SHOWN = 30
DECISIONS_SHOWN = 100
DECISIONS = {
    "provisioning_activate": "activates {machines} of {offer} at {usd_per_h} USD/h",
    "provisioning_release": "releases {machine_id}",
    "provisioning_end": "ends the run",
    "machine_gone": "{machine} of {pool}: {phase}",
    "machine_may_still_cost": "could not stop {machine} of {pool}: it may still cost",
}


class Tile(NamedTuple):
    label: str
    value: str
    note: str


class EventRow(NamedTuple):
    when: str
    kind: str
    fields: str


def write_report(run_dir: Path, status: RunStatus | None = None) -> Path:
    """Write ``report.html`` into a run folder and return its path. Blocks; takes a second or two.

    ``status`` adds a table of the workers as they are now. Raises UserError when ``run_dir`` is not a run folder.
    """
    path = run_dir / "report.html"
    write_file(path, render_report(read_run(run_dir), status).encode())
    return path


def render_report(run: RunFolder, status: RunStatus | None = None) -> str:
    """The page of ``run`` as HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("echo2.report", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["visible"] = visible
    tables = [
        _summary_table(run),
        tasks_table(run),
        audit_table(run),
        set_aside_table(run),
        _cost_table(run),
        *([_workers_table(status.workers)] if status and status.workers else []),
        _decisions_table(run.events),
    ]
    return environment.get_template("report.html.j2").render(
        run=run,
        subtitle=_subtitle(run),
        notices=_notices(run),
        tiles=_tiles(run.metrics),
        charts=charts(run.metrics, run.evals, staleness_budget(run.config)),
        timeline=timeline_chart(run.events),
        tables=[table for table in tables if table.rows],
        events=[_event_row(event) for event in run.events[-EVENTS_SHOWN:]],
    )


def staleness_budget(config: Mapping[str, Any]) -> int | None:
    """S of a resolved configuration; None where it does not say."""
    mode = config.get("run", {}).get("mode", "echo2")
    if mode in ("sync", "async"):
        return 0 if mode == "sync" else 1
    budget = config.get("staleness", {}).get("budget")
    return budget if isinstance(budget, int) else None


def _subtitle(run: RunFolder) -> str:
    mode = run.config.get("run", {}).get("mode", "echo2")
    model = run.config.get("model", {}).get("path", "")
    parts = [f"mode {mode}", *([f"model {model}"] if model else [])]
    if run.metrics:
        last = run.metrics[-1]
        ended = datetime.fromtimestamp(last.wall_time, UTC).strftime("%Y-%m-%d %H:%M UTC")
        parts.append(f"last step {ended}")
    return " · ".join(parts)


def _notices(run: RunFolder) -> list[str]:
    notices = []
    if not run.metrics:
        notices.append("No training step has ended yet, so there is nothing to plot.")
    if run.unreadable_lines:
        notices.append(f"{run.unreadable_lines} lines of this run folder could not be read and are left out.")
    return notices


def _tiles(lines: Sequence[StepMetrics]) -> list[Tile]:
    if not lines:
        return []
    last = lines[-1]
    span = min(5, len(lines))
    start, end = _mean(m.reward_mean for m in lines[:span]), _mean(m.reward_mean for m in lines[-span:])
    largest = max(m.staleness_max for m in lines)
    return [
        Tile("Reward", f"{start:.2f} → {end:.2f}", f"mean of first and last {span} steps"),
        Tile("Steps", str(last.step + 1), f"in {duration(last.elapsed_s)}"),
        Tile("Staleness", f"max {largest}", f"mean {_mean(m.staleness_mean for m in lines):.2f} steps"),
        Tile("Bubble", f"{last.bubble_ratio:.1%}", "of the learner's time"),
        Tile("Pool", f"{last.mu_pool_per_s:.3g}/s", f"{last.workers_active} workers at the end"),
        Tile("Cost", usd(last.cost_usd), f"{usd(last.usd_per_h)} per hour"),
    ]


def _summary_table(run: RunFolder) -> Table:
    if not run.metrics:
        return Table("Numbers", (), ())
    last = run.metrics[-1]
    trains = sorted(m.t_train_s for m in run.metrics)
    bcasts = sorted(m.t_bcast_s for m in run.metrics if m.t_bcast_s is not None)
    refused = ", ".join(f"{verdict} {count}" for verdict, count in sorted(last.refused_by.items()) if count)
    budget = staleness_budget(run.config)
    rows = [
        ("Trajectories generated", f"{last.generated:,}"),
        ("… trained on", f"{last.trained:,}"),
        ("… buffered at the end", f"{last.buffered:,}"),
        ("… expired", f"{last.expired:,}" + _length(last.expired_length_mean)),
        ("… refused", f"{last.refused:,}" + (f" ({refused})" if refused else "")),
        ("… failed", f"{last.failed:,}"),
        ("Unattributed, outside the sum", f"{last.unattributed:,}"),
        *_rescored_rows(last),
        ("Groups dropped", f"{last.groups_dropped:,}"),
        ("Cost of a step, mean", usd(last.cost_usd / len(run.metrics))),
        ("Staleness budget S", "unknown" if budget is None else str(budget)),
        ("T_train, median", f"{trains[len(trains) // 2]:.2f} s"),
        ("T_bcast, median", f"{bcasts[len(bcasts) // 2]:.2f} s" if bcasts else "not measured"),
        *_travel_rows(last),
    ]
    scored = [(line, line.reward_mean) for line in run.evals if line.reward_mean is not None]
    if scored:
        newest, reward = scored[-1]
        rows.append(("Held-out reward", f"{reward:.3f} at version {newest.version}, {newest.prompts} prompts"))
    return Table("Numbers", (), rows)


def _rescored_rows(last: StepMetrics) -> list[tuple[str, str]]:
    if not last.rescored and not last.rescoring_failed:
        return []
    failed = f", {last.rescoring_failed:,} could not be scored" if last.rescoring_failed else ""
    return [("Rewards scored again", f"{last.rescored:,}, of which {last.rescored_differing:,} differ{failed}")]


def _length(tokens: float | None) -> str:
    return "" if tokens is None else f" (of {tokens:.0f} tokens on average)"


def _cost_table(run: RunFolder) -> Table:
    """Who the money went to; dearest first."""
    head = ("paid for", "USD", "share")
    if not run.metrics or not run.metrics[-1].cost_usd:
        return Table("Cost", head, ())
    last = run.metrics[-1]
    costs = sorted(last.cost_usd_by_name.items(), key=lambda pair: (-pair[1], pair[0]))
    parts = costs[:PAYEES_SHOWN]
    if more := costs[PAYEES_SHOWN:]:
        parts.append((f"{len(more)} others", sum(cost for _, cost in more)))
    earlier = last.cost_usd - sum(cost for _, cost in costs)
    if earlier > 1e-9 * last.cost_usd:
        parts.append(("before the coordinator last started", earlier))
    rows = [(visible(name), usd(cost), f"{cost / last.cost_usd:.1%}") for name, cost in parts]
    return Table("Cost", head, [*rows, ("together", usd(last.cost_usd), "")])


def _decisions_table(events: Sequence[Mapping[str, Any]]) -> Table:
    """What the controller of the pools did and why; that it kept things is left out."""
    told = [event for event in events if event.get("kind") in DECISIONS]
    rows = [
        (
            _clock(event),
            DECISIONS[event["kind"]].format_map(_Known(event)),
            str(event.get("reason") or event.get("detail") or ""),
        )
        for event in told[-DECISIONS_SHOWN:]
    ]
    return Table("Machines", ("when", "what", "why"), [(a, visible(b), visible(c)) for a, b, c in rows])


class _Known(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


def _travel_rows(last: StepMetrics) -> list[tuple[str, str]]:
    """How snapshots reached the workers; what was not measured is left out."""
    rows = [("Snapshot", megabytes(last.snapshot_bytes))]
    if last.publish_bytes:
        changed = "" if last.changed_share is None else f", {last.changed_share:.2%} of the elements changed"
        rows.append(("… last sent as", megabytes(last.publish_bytes) + changed))
    if last.delta_share is not None:
        rows.append(("Publishes sent as deltas", f"{last.delta_share:.0%}"))
    if last.t_bcast_predicted_s is not None and last.t_bcast_bound_s is not None:
        plan, bound = last.t_bcast_predicted_s, last.t_bcast_bound_s
        rows.append(("… of it on the lines, by plan", f"{plan:.2f} s, no plan under {bound:.2f} s"))
    if last.seed_sent_bytes:
        rows.append(("Sent by the coordinator's relay", megabytes(last.seed_sent_bytes)))
        rows.append(("… by the workers' relays", megabytes(last.workers_sent_bytes)))
    if last.reparentings:
        rows.append(("Relays that turned to another parent", f"{last.reparentings:,}"))
    return rows


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _workers_table(workers: Iterable[Mapping[str, Any]]) -> Table:
    head = ("worker", "installed", "state", "trajectories", "per second", "USD/h", "cost", "last heard")
    rows = [
        (
            visible(str(row.get("name") or row.get("id", ""))),
            str(row.get("installed") or "-"),
            visible(str(row.get("state", ""))),
            f"{int(row.get('rows') or 0):,}",
            f"{float(row.get('rate_per_s') or 0.0):.3g}",
            f"{float(row.get('usd_per_h') or 0.0):.3g}",
            usd(float(row.get("cost_usd") or 0.0)),
            f"{float(row.get('last_seen_s') or 0.0):.0f} s ago",
        )
        for row in workers
    ]
    return Table("Workers", head, rows)


def _event_row(event: Mapping[str, Any]) -> EventRow:
    fields = {name: value for name, value in event.items() if name not in ("kind", "wall_time")}
    text = json.dumps(fields, ensure_ascii=False, default=str)[1:-1] if fields else ""
    return EventRow(_clock(event), visible(str(event.get("kind", ""))), visible(text[:EVENT_CHARACTERS]))


def _clock(event: Mapping[str, Any]) -> str:
    time = event.get("wall_time")
    return datetime.fromtimestamp(time, UTC).strftime("%H:%M:%S") if isinstance(time, int | float) else ""


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
