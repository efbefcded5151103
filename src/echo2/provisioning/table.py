"""Price lists as tables: from the bytes of a CSV file to rows of text by column name.

Invariant: every fault of the file is a sentence that names the file and, where there is one, the row as a spreadsheet
counts it (the header is row 1); a file that is too large is refused before it is read.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from echo2.errors import ConfigError
from echo2.provisioning.cells import shorten

MAX_FAULTS = 20
"""Sentences that one refusal holds; a file with the wrong unit in each of 10,000 rows is understood before that."""
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_WIDE = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Columns(msgspec.Struct, frozen=True):
    """Which columns a table has."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    others_pass: bool = False
    """Whether columns that are neither are passed over rather than refused: for files whose format is not ours."""
    meant: Mapping[str, str] = {}
    """What other people call our columns, for suggestions only."""


class Row(msgspec.Struct, frozen=True):
    number: int
    """As a spreadsheet counts: the header is row 1."""
    cells: dict[str, str]
    """By column name, stripped; absent columns are absent."""


class Table(msgspec.Struct, frozen=True):
    rows: list[Row]
    faults: list[str]
    """Of rows that do not fit the header; those rows are left out."""


def read_file(path: Path, what: str, max_bytes: int) -> bytes:
    """The bytes of ``path``. Raises ConfigError when it cannot be read or is larger than ``max_bytes``."""
    try:
        if path.is_dir() or not path.exists():  # pipes may be read, too
            missing = "it is a folder" if path.is_dir() else "there is no such file"
            raise ConfigError(f"{what} must be a CSV file, but {path}: {missing}")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{what} must be a readable file, but {path}: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{what} must be at most {max_bytes / 1e6:.0f} MB, and {path} is larger")
    return data


def parse_table(data: bytes, origin: str, columns: Columns) -> Table:
    """Rows of the CSV text ``data``; ``origin`` is what sentences call it.

    UTF-8, with or without a byte order mark; commas; quotes around cells that hold a comma. Blank rows are passed over.
    Raises ConfigError for text that is no table and for every missing, unknown or doubled column.
    """
    records = _records(_decode(data, origin), origin)
    if not records:
        raise ConfigError(f"{origin} must have a row of column names, {', '.join(columns.required)}, and is empty")
    (_, header), *rest = records
    header = [name.strip() for name in header]
    if faults := _header_faults(header, columns):
        refuse([f"{origin}, row 1: {fault}" for fault in faults])
    table = Table([], [])
    for number, record in rest:
        if len(record) == len(header):
            table.rows.append(Row(number, dict(zip(header, map(str.strip, record), strict=True))))
        else:
            table.faults.append(
                f"{origin}, row {number}: must have {len(header)} cells, as the header has, got {len(record)}; "
                "quote a cell that holds a comma, and write numbers without separators of thousands"
            )
    return table


def refuse(faults: list[str]) -> NoReturn:
    """Raise ConfigError with the first ``MAX_FAULTS`` sentences and the number of others."""
    more = len(faults) - MAX_FAULTS
    raise ConfigError(faults if more <= 0 else [*faults[:MAX_FAULTS], f"… and {more} more faults like these"])


def nearest(word: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """The known word that ``word`` was probably meant to be, else an empty string."""
    lowered = word.lower().replace(" ", "_").replace("-", "_")
    if meant and lowered in meant:
        return meant[lowered]
    names = {name.lower(): name for name in known}
    return next((names[near] for near in difflib.get_close_matches(lowered, names, 1, 0.6)), "")


def _decode(data: bytes, origin: str) -> str:
    if data.startswith(_WIDE) or b"\0" in data[:1024]:
        raise ConfigError(f"{origin} must be UTF-8 text, got UTF-16 or binary data; save it as CSV in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{origin}, row {row}: must be UTF-8 text, got the byte 0x{data[error.start]:02x}; save it as CSV in UTF-8"
        ) from None


def _records(text: str, origin: str) -> list[tuple[int, list[str]]]:
    """(row number, cells) of every row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records: list[tuple[int, list[str]]] = []
    number = 0
    try:
        for number, record in enumerate(reader, 1):
            if any(cell.strip() for cell in record):
                records.append((number, record))
    except csv.Error as error:
        raise ConfigError(f"{origin}, row {number + 1}: must be valid CSV, but: {error}") from None
    return records


def _header_faults(header: list[str], columns: Columns) -> list[str]:
    known = (*columns.required, *columns.optional)
    if len(header) == 1 and (other := next((mark for mark in _OTHER_DELIMITERS if mark in header[0]), None)):
        return [f"columns must be separated by commas, got {_OTHER_DELIMITERS[other]}"]
    faults = [f"the column {name} must be there once, got it twice" for name in known if header.count(name) > 1]
    missing = [name for name in columns.required if name not in header]
    if missing:
        faults.append(f"the column{'s' * (len(missing) > 1)} {', '.join(missing)} must be there, got {_list(header)}")
    if not columns.others_pass:
        faults += [_unknown(name, known, columns) for name in dict.fromkeys(header) if name not in known]
    return faults


def _unknown(name: str, known: tuple[str, ...], columns: Columns) -> str:
    near = nearest(name, known, columns.meant)
    suggestion = f"the nearest known column is {near}" if near else f"known columns are {', '.join(known)}"
    return f"unknown column {shorten(name)}; {suggestion}"


def _list(names: list[str]) -> str:
    return ", ".join(shorten(name) for name in names[:12]) + ("…" if len(names) > 12 else "")
