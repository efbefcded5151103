"""Tables of a report about its tasks and about whom it trusts.

Invariant: whatever came from a task or a worker is made visible before it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from echo2.report.folder import RunFolder
from echo2.report.visible import visible


class Table(NamedTuple):
    title: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def tasks_table(run: RunFolder) -> Table:
    """How each task of the run fares, over the first and the last lines that had rows of it."""
    names = sorted({task for line in run.metrics for task in line.reward_by_task})
    rows = []
    for task in names:
        lines = [line for line in run.metrics if task in line.reward_by_task]
        span = min(5, len(lines))
        start, end = (fmean(x.reward_by_task[task] for x in part) for part in (lines[:span], lines[-span:]))
        passes = [x.pass_share_by_task[task] for x in lines[-span:] if task in x.pass_share_by_task]
        count = sum(line.rows_by_task.get(task, 0) for line in lines)
        share = f"{fmean(passes):.1%}" if passes else "-"
        rows.append((visible(task), f"{count:,}", f"{start:.3f} → {end:.3f}", share))
    return Table("Tasks", ("task", "trajectories", "reward", "pass at the end"), rows)


def audit_table(run: RunFolder) -> Table:
    """How far each worker's log-probs are from the learner's, in nats a token; the farthest first."""
    audited = run.metrics[-1].audited if run.metrics else {}
    rows = [
        (
            visible(x.name),
            f"{x.groups:,}",
            f"{x.tokens:,}",
            f"{x.mean_nats:.4f}",
            f"{x.p99_nats:.3g}",
            f"{x.beyond_share:.2%}",
        )
        for x in sorted(audited.values(), key=lambda x: -x.mean_nats)
    ]
    return Table("Log-probs compared, in nats", ("worker", "groups", "tokens", "mean", "p99", "beyond 0.5"), rows)


def set_aside_table(run: RunFolder) -> Table:
    """Workers whose work was not taken any more."""
    told = dict(run.metrics[-1].set_aside) if run.metrics else {}
    told |= {
        str(event.get("worker", "")): f"{event.get('name', '')}: {event.get('reason', '')}"
        for event in run.events
        if event.get("kind") == "worker_set_aside"
    }
    rows = [(visible(worker), visible(text)) for worker, text in told.items()]
    return Table("Workers set aside", ("worker", "name and reason"), rows)
