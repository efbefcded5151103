"""What ``echo2 eval`` found, as text for people.

Invariant: every number shown is one of the facts that ``--json`` prints; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def evaluation_text(facts: dict[str, Any]) -> str:
    mean, bounds = facts["reward_mean"], facts["reward_ci95"]
    if mean is None:
        return "\n".join([f"{facts['model']}: no reply could be scored, {facts['failed']} failed", *_faults(facts)])
    spread = f" (95 % interval {bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else ""
    counts = ", ".join(f"{name} {count}" for name, count in facts["statuses"].items())
    head = (
        f"{facts['model']}: mean reward {mean:.3f}{spread} over {facts['prompts']} held-out prompts, "
        f"{facts['replies']} replies ({counts}), {facts['failed']} failed"
    )
    lines = [head, *_faults(facts)]
    several = len(facts["by_task"]) > 1
    if facts.get("reward_more") is not None:
        bounds = facts["reward_more_ci95"]
        spread = f" (95 % interval {bounds[0]:+.3f} to {bounds[1]:+.3f})" if bounds else ""
        lines.append(f"against {facts['against']}, on the same prompts: {facts['reward_more']:+.3f}{spread}")
    for name, of_task in facts["by_task"].items():
        if several or not of_task["table"]:
            lines.append(_line(name, of_task, several))
        lines += _table(of_task["table"]) if of_task["table"] else []
    return "\n".join(lines)


def _faults(facts: dict[str, Any]) -> list[str]:
    return [f"failed: {fault}" for fault in facts["faults"]]


def _line(name: str, facts: dict[str, Any], several: bool) -> str:
    """several: beside others, whose mean stands in the line above."""
    measured = [
        f"{metric} {found['value']:.3f}" + (" ({:.3f} to {:.3f})".format(*found["ci95"]) if found["ci95"] else "")
        for metric, found in facts.get("measures", {}).items()
        if found["value"] is not None
    ]
    parts = [", ".join(measured) or "no pass or fail in this task"]
    if several and facts["reward_mean"] is not None:
        told = ", ".join(measured) or f"mean reward {facts['reward_mean']:.3f}"
        parts = [f"{told} over {facts['prompts']} prompts"]
    if several and facts["failed"]:
        parts.append(f"{facts['failed']} replies failed")
    if facts["excluded_rows"]:
        parts.append(f"{facts['excluded_rows']} rows left out")
    if "to_report_it" in facts:
        parts.append(facts["to_report_it"])
    return f"{name}: {'; '.join(parts)}"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table, a column for each key."""
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return " to ".join(map(_cell, value)) if isinstance(value, tuple) else str(value)
