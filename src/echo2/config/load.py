"""From a TOML file and overrides to a ``Config``, or to every fault at once.

Invariant: either a feasible ``Config`` comes back or one ``ConfigError`` holds a sentence for each fault of the file,
the overrides and the relations between keys; a value is never converted silently (text is no number, true is not 1).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from echo2.config.feasible import infeasibilities
from echo2.config.override import apply_override, parse_overrides
from echo2.config.places import missing_places, resolve_places
from echo2.config.root import Config
from echo2.config.schema import LISTS, POOLS, SECTIONS, TASKS, is_pair, unknown_key
from echo2.config.sections import Section
from echo2.errors import ConfigError

S = TypeVar("S", bound=Section)

MAX_FILE_BYTES = 1 << 20
"""Far above any configuration; a model file given by mistake is refused before it is read."""


def load_config(path: Path, overrides: Sequence[str] = (), *, check_places: bool = True) -> Config:
    """Read ``path``, apply ``overrides``, check everything. Raises ConfigError with one sentence per fault.

    ``check_places=False`` leaves out whether named files exist, for configurations written on another machine.
    """
    return build_config(read_tables(path), overrides, base=path.parent, check_places=check_places)


def build_config(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, base: Path | None = None, check_places: bool = True
) -> Config:
    """The same for tables that are already parsed; relative paths in them are relative to ``base``."""
    tables = _copy(data)
    resolve_places(tables, base or Path.cwd())
    parsed, faults = parse_overrides(overrides)
    faults += [fault for override in parsed if (fault := apply_override(tables, override))]
    if any(override.path[0] in ("model", TASKS, POOLS) for override in parsed):
        resolve_places(tables, Path.cwd())
    sections, blamed = _sections(tables, faults)
    whole = Config.model_construct(**sections)
    faults += [fault.sentence for fault in infeasibilities(whole) if not _touches(fault.keys, blamed)]
    if check_places and blamed.isdisjoint((TASKS, POOLS, "model.path")):
        faults += missing_places(whole)
    if faults:
        raise ConfigError(faults)
    return Config(**sections)


def read_tables(path: Path) -> dict[str, Any]:
    """A TOML file as it stands. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"a configuration must be a TOML file below 1 MiB, and {path} is larger")
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text, but {error.reason} at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} must be valid TOML, but: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"the configuration {path} must exist, but there is no such file") from None
    except OSError as error:
        raise ConfigError(f"the configuration {path} must be a readable file, but: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a NUL in the name; tables in tables without end
        raise ConfigError(
            f"the configuration must be a file's name and hold TOML, got {str(path)!r}: {error}"
        ) from None


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _touches(keys: tuple[str, ...], blamed: set[str]) -> bool:
    """Whether a relation names a key that already has a fault of its own, so that its sentence would mislead."""
    return not blamed.isdisjoint(keys)


def _sections(tables: dict[str, Any], faults: list[str]) -> tuple[dict[str, Any], set[str]]:
    """Validate section by section; add sentences to ``faults``, return the valid parts and the dotted keys blamed."""
    sections: dict[str, Any] = {}
    blamed: set[str] = set()
    for name, value in tables.items():
        if name not in SECTIONS:
            faults.append(unknown_key("", name))
        elif name in LISTS:
            sections[name] = _list(name, value, faults, blamed)
        elif not isinstance(value, dict):
            faults.append(f"[{name}] must be a table of keys, got {_shown(value)}; write [{name}] on a line of its own")
            blamed.update(f"{name}.{key}" for key in SECTIONS[name].model_fields)
        else:
            sections[name] = _section(name, name, value, faults, blamed)
    for name, field in Config.model_fields.items():
        sections.setdefault(name, field.default)
    return sections, blamed


def _list(name: str, value: Any, faults: list[str], blamed: set[str]) -> tuple[Section, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        faults.append(f"{name} must be an array of tables, got {_shown(value)}; write [[{name}]] with double brackets")
        blamed.add(name)
        return ()
    parts = []
    for index, item in enumerate(value):
        before = len(faults)
        part = _section(name, f"{name}.{index}", item, faults, blamed)
        if len(faults) == before:
            parts.append(part)
        else:
            blamed.add(name)
    return tuple(parts)


def _section(section: str, label: str, table: dict[str, Any], faults: list[str], blamed: set[str]) -> Section:
    known = {key: _toml(section, key, value) for key, value in table.items()}
    return check_table(SECTIONS[section], label, known, faults, blamed, lambda key: unknown_key(section, key))


def check_table(
    model: type[S],
    label: str,
    table: Mapping[str, Any],
    faults: list[str],
    blamed: set[str],
    unknown: Callable[[str], str],
) -> S:
    """``table`` as a ``model``; adds a sentence to ``faults`` for each key that is wrong, and its dotted name to
    ``blamed``. What comes back lacks the wrong keys.

    unknown: the sentence about a key that ``model`` has not.
    """
    known = {key: value for key, value in table.items() if key in model.model_fields}
    faults += [unknown(key) for key in table if key not in model.model_fields]
    try:
        return model.model_validate(known, strict=True)
    except ValidationError as error:
        for detail in error.errors():
            key = str(detail["loc"][0])
            if f"{label}.{key}" not in blamed:
                faults.append(_sentence(f"{label}.{key}", known.get(key), detail))
            blamed.add(f"{label}.{key}")
            known.pop(key, None)
    return cast("S", model.model_construct(**known))


def _toml(section: str, key: str, value: Any) -> Any:
    if key not in SECTIONS[section].model_fields:
        return value
    return tuple(value) if isinstance(value, list) and is_pair(section, key) else value


def _sentence(key: str, value: Any, detail: ErrorDetails) -> str:
    """What must hold and what was got, in plain words; pydantic's own only where ours have none."""
    if detail["type"] == "missing" and len(detail["loc"]) == 1:
        return f"{key} must be given"
    context = detail.get("ctx", {})
    number = isinstance(value, float) and value != value  # NaN is blamed as such, not for a bound it fails by accident
    must = _MUST["finite_number"] if number else _MUST.get(detail["type"], "")
    if detail["type"] == "literal_error":
        must = f"be one of {context['expected'].replace(chr(39), chr(34))}"
    if detail["type"] == "must":  # a section's own words
        must = detail["msg"]
    if key == "run.name" or (key.startswith("tasks.") and key.endswith(".label")):
        must = "be 1 to 64 letters, digits, dots, dashes or underscores, beginning with a letter or digit"
    if not must:
        return f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {_shown(value)}"
    return f"{key} must {must.format(**context)}{_WHY.get(key, '')}, got {_shown(value)}"


_WHY = {"rollout.group_size": ", since an advantage compares the replies to one prompt"}
"""Reasons that a bound alone does not tell."""

_MUST = {
    "greater_than": "be more than {gt:g}",
    "greater_than_equal": "be at least {ge:g}",
    "less_than": "be less than {lt:g}",
    "less_than_equal": "be at most {le:g}",
    "int_type": "be a whole number",
    "float_type": "be a number",
    "bool_type": "be true or false",
    "string_type": 'be text in quotes ("…")',
    "dict_type": "be a table",
    "tuple_type": "be an array",
    "too_long": "be an array of {max_length}",
    "missing": "be an array of 2",
    "finite_number": "be a finite number",
}


def _shown(value: Any) -> str:
    """The value as a TOML file would write it, shortened."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = f'"{value}"'
    else:
        text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "…"
