"""Overrides given on the command line: ``--set section.key=value``.

Invariant: an override can say whatever the file can say, in the same syntax, and nothing else; text may go unquoted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

from echo2.config.root import Config
from echo2.config.schema import TASKS, is_text

_BARE_TEXT = re.compile(r"""[^\s"'\[\]{}#=][^\n"'\[\]{}]*""")
"""What may stand for text without quotes: nothing that looks like unfinished TOML."""


class Override(NamedTuple):
    path: tuple[str, ...]
    """Section, key and, inside a task's options, further keys; ``tasks`` and ``pools`` are followed by an index."""
    value: Any


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Parse ``a.b=c`` texts; return the overrides and a sentence for each text that is not one."""
    overrides: list[Override] = []
    faults: list[str] = []
    for text in texts:
        try:
            overrides.append(_parse(text))
        except ValueError as error:
            faults.append(str(error))
    return overrides, faults


def _parse(text: str) -> Override:
    name, equals, raw = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise ValueError(
            f"--set must have the form section.key=value, got `{text}`; for example --set learning.lr=1e-6"
        )
    return Override(path, _value(path, raw.strip(), text))


def _value(path: tuple[str, ...], raw: str, text: str) -> Any:
    if len(path) >= 2 and is_text(path[0], path[-1]) and _BARE_TEXT.fullmatch(raw):
        return raw
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if parsed.keys() == {"value"}:
        return parsed["value"]
    if _BARE_TEXT.fullmatch(raw):
        return raw
    raise ValueError(f'--set {".".join(path)}= must be followed by a TOML value, got `{text}`; quote text as "…"')


def apply_override(data: dict[str, Any], override: Override) -> str | None:
    """Write the override into ``data`` (tables of a TOML file); return a sentence when it has no place there."""
    *parents, last = override.path
    table: Any = data
    for depth, part in enumerate(parents):
        if isinstance(table, list):
            table, fault = _entry(parents[0], table, part)
            if fault:
                return fault
        else:
            table = table.setdefault(part, _default_tasks() if part == TASKS and depth == 0 else {})
        if not isinstance(table, dict | list):
            return f"--set {'.'.join(override.path)}: `{'.'.join(parents[: depth + 1])}` is a value, not a table"
    if isinstance(table, list):
        return f"--set {'.'.join(override.path)}: name a key of one of them, as in --set {parents[0]}.0.KEY=…"
    table[last] = override.value
    return None


def _default_tasks() -> list[dict[str, Any]]:
    return [task.model_dump(exclude_defaults=True) for task in Config.model_fields[TASKS].default]


def _entry(name: str, tables: list[Any], index: str) -> tuple[Any, str | None]:
    if index.isdecimal() and int(index) < len(tables):
        return tables[int(index)], None
    if not tables:
        return None, f"--set {name}.{index} needs a [[{name}]] table in the file, and there is none"
    return None, f"--set {name}.N needs a number from 0 to {len(tables) - 1}, got `{index}`; the first is {name}.0"
