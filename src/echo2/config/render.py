"""The whole resolved configuration as TOML, and its digest.

Invariant: loading a rendering gives the same ``Config`` back, and equal configurations have equal digests whatever the
order of keys in the files they came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.items import Table

from echo2.config.root import Config
from echo2.config.schema import LISTS, SECTIONS
from echo2.config.sections import Section


def render_config(config: Config) -> str:
    """Every key with its value, below its meaning as a comment."""
    return render_sections({name: getattr(config, name) for name in SECTIONS}, LISTS)


def render_sections(sections: Mapping[str, Section | Sequence[Section]], arrays: Mapping[str, type[Section]]) -> str:
    """The same for any tables; arrays: what each table of an array is."""
    document = tomlkit.document()
    for name, value in sections.items():
        if isinstance(value, Section):
            document.add(name, _table(value))
        elif value:
            tables = tomlkit.aot()
            for part in value:
                tables.append(_table(part))
            document.add(name, tables)
        else:
            _add_outline(document, name, arrays[name])
    return tomlkit.dumps(document)


def _add_outline(document: TOMLDocument, name: str, model: type[Section]) -> None:
    """What a table of an array would hold that has none, as a comment."""
    document.add(tomlkit.comment(f"[[{name}]]"))
    for key, field in model.model_fields.items():
        for line in (field.description or "").splitlines():
            document.add(tomlkit.comment(f"# {line}"))
        unset = field.is_required() or field.default is None
        default = "…" if unset else _item(field.default).as_string()
        document.add(tomlkit.comment(f"{key} = {default}"))
    document.add(tomlkit.nl())


def _table(section: Section) -> Table:
    table = tomlkit.table()
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if field.description:
            for line in field.description.splitlines():
                table.add(tomlkit.comment(line))
        if value is None:
            settled = section.settled(key)
            table.add(tomlkit.comment(f"{key} = {'…' if settled is None else _item(settled).as_string()}"))
        else:
            table.add(key, _item(value))
    return table


def _item(value: Any) -> Any:
    if isinstance(value, dict):
        inline = tomlkit.inline_table()
        for key, item in value.items():
            inline.append(key, _item(item))
        return inline
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(_item(item) for item in value)
        return array
    return tomlkit.item(value)


def config_digest(config: Config) -> str:
    """Hex SHA-256 of the canonical JSON of every key."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
