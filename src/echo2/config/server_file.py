"""The ``[server]`` table of a file on a worker's own machine.

Invariant: what it says is checked like a run's configuration; the file may be one, its other tables are not looked at.
"""

from __future__ import annotations

from pathlib import Path

from echo2.config.load import check_table, read_tables
from echo2.config.schema import is_pair, unknown_key
from echo2.config.sections import ServerSection
from echo2.errors import ConfigError

SECTION = "server"


def load_server(path: Path | None) -> ServerSection:
    """Defaults for None. Raises ConfigError with one sentence per fault."""
    if path is None:
        return ServerSection()
    table = read_tables(path).get(SECTION, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{SECTION}] of {path} must be a table of keys")
    known = {key: tuple(value) if isinstance(value, list) and is_tuple(key) else value for key, value in table.items()}
    faults: list[str] = []
    section = check_table(ServerSection, SECTION, known, faults, set(), lambda key: unknown_key(SECTION, key))
    if faults:
        raise ConfigError([f"{path}: {fault}" for fault in faults])
    return section


def is_tuple(key: str) -> bool:
    return key in ServerSection.model_fields and is_pair(SECTION, key)
