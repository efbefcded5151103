"""A run folder, read for people.

Invariant: reading changes nothing and tolerates a folder that a run is still writing, or that a crash left: a line
that cannot be read is counted, never fatal. Where a rollback trained a step again, the newest incarnation's line
stands.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from echo2.errors import UserError
from echo2.metrics import StepMetrics
from echo2.report.transcripts import Transcript

MAX_TRANSCRIPTS = 24
"""Shown in a report, spread evenly over the run."""

T = TypeVar("T")


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``evals.jsonl``: held-out prompts scored under one published version."""

    version: int
    reward_mean: float | None
    """None when no prompt could be scored."""
    prompts: int
    samples: int = 1
    """Replies per prompt."""


class RunFolder(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    name: str
    metrics: tuple[StepMetrics, ...]
    """Rising steps."""
    evals: tuple[EvalRecord, ...]
    events: tuple[dict[str, Any], ...]
    transcripts: tuple[Transcript, ...]
    transcripts_total: int
    config_text: str
    config: dict[str, Any]
    unreadable_lines: int


def read_run(path: Path) -> RunFolder:
    """Raises UserError when ``path`` is not a run folder."""
    config_file = path / "config.toml"
    if not config_file.is_file():
        raise UserError(f"a run folder must hold config.toml, got {path}: give the folder that `echo2 train` printed")
    config_text = config_file.read_text(encoding="utf-8", errors="replace")
    config = _config(config_text)
    faults: list[bytes] = []
    metrics = {line.step: line for line in _decoded(path / "metrics.jsonl", _metrics, faults)}
    transcript_lines = list(_lines(path / "transcripts.jsonl"))
    shown = _spread(transcript_lines, MAX_TRANSCRIPTS)
    return RunFolder(
        path=path,
        name=str(config.get("run", {}).get("name", path.name)),
        metrics=tuple(metrics[step] for step in sorted(metrics)),
        evals=tuple(_decoded(path / "evals.jsonl", lambda line: msgspec.json.decode(line, type=EvalRecord), faults)),
        events=tuple(
            _decoded(path / "events.jsonl", lambda line: msgspec.json.decode(line, type=dict[str, Any]), faults)
        ),
        transcripts=tuple(_each(shown, lambda line: msgspec.json.decode(line, type=Transcript), faults)),
        transcripts_total=len(transcript_lines),
        config_text=config_text,
        config=config,
        unreadable_lines=len(faults),
    )


def _metrics(line: bytes) -> StepMetrics:
    """A line of ``metrics.jsonl``; JSON has no NaN, so a statistic that was one arrives as null and is left out."""
    values = msgspec.json.decode(line, type=dict[str, Any])
    for field in ("learner", "reward_by_task", "pass_share_by_task"):
        group = values.get(field)
        if isinstance(group, Mapping):
            values[field] = {name: value for name, value in group.items() if value is not None}
    return msgspec.convert(values, StepMetrics)


def _decoded(path: Path, decode: Callable[[bytes], T], faults: list[bytes]) -> Iterator[T]:
    return _each(_lines(path), decode, faults)


def _each(lines: Iterable[bytes], decode: Callable[[bytes], T], faults: list[bytes]) -> Iterator[T]:
    for line in lines:
        try:
            yield decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            faults.append(line)


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield line


def _spread(lines: list[bytes], count: int) -> list[bytes]:
    if len(lines) <= count:
        return lines
    return [lines[round(place * (len(lines) - 1) / (count - 1))] for place in range(count)]


def _config(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}
