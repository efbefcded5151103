"""Rows of local data files: JSONL, a JSON array, CSV or Parquet, by the file's suffix.

Invariant: every row has its number, from 1, as a person finds it in the file: the line of a JSONL or CSV file, the
position in a JSON array or Parquet file. A row that is no object is a fault of that row, a file that cannot be read is
a ConfigError.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from echo2.errors import ConfigError

Fields = dict[str, Any]

MAX_TEXT_CHARS = 1_000_000
"""Of a question: far more than any model reads, far less than a message may hold."""
SHOWN_CHARS = 100
"""Of a wrong value in a sentence."""


class Excluded(msgspec.Struct, frozen=True):
    """A row that is no prompt, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, row {self.line}: {self.reason}"


def read_rows(path: str, task: str) -> Iterator[tuple[int, Fields | ValueError]]:
    """(row number, its fields or what is wrong with it). Raises ConfigError in the name of ``task``."""
    file = Path(path).expanduser()
    try:
        if file.suffix == ".parquet":
            yield from enumerate(_parquet(file, task), 1)
        elif file.suffix == ".csv":
            yield from _csv(file.read_text(encoding="utf-8-sig"))
        elif file.suffix == ".json":
            yield from enumerate(map(_object, _array(_read(file))), 1)
        else:
            yield from _jsonl(_read(file))
    except OSError as error:
        raise ConfigError(f"{task}: path must name a readable file, got {path!r}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{task}: {path} must be {file.suffix[1:]} in UTF-8: {error}") from error


def text_of(name: str, value: Any) -> str:
    """A question. Raises ValueError for what is none."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {name} must be a text, got {_shown(value)}")
    if len(value) > MAX_TEXT_CHARS:
        raise ValueError(f"field {name} must have at most {MAX_TEXT_CHARS} characters, got {len(value)}")
    return value


def answer_of(name: str, value: Any) -> str:
    """A gold answer, numbers without an exponent, which would be read as a product. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"field {name} must be a text or a number, got {_shown(value)}")
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        raise ValueError(f"field {name} must be a finite number, got {value}")
    return format(Decimal(repr(value)) if isinstance(value, float) else Decimal(value), "f")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _read(file: Path) -> bytes:
    return file.read_bytes().removeprefix(codecs.BOM_UTF8)


def _jsonl(content: bytes) -> Iterator[tuple[int, Fields | ValueError]]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, _object(msgspec.json.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield number, ValueError(f"a row must be a JSON object: {error}")


def _array(content: bytes) -> list[Any]:
    rows = msgspec.json.decode(content)
    if not isinstance(rows, list):
        raise msgspec.DecodeError(f"expected an array of objects, got {type(rows).__name__}")
    return rows


def _object(row: Any) -> Fields | ValueError:
    return row if isinstance(row, dict) else ValueError(f"a row must be a JSON object, got a {type(row).__name__}")


def _csv(content: str) -> Iterator[tuple[int, Fields | ValueError]]:
    reader = csv.DictReader(io.StringIO(content, newline=""))
    for row in reader:
        yield reader.line_num, {name: value for name, value in row.items() if isinstance(name, str)}


def _parquet(file: Path, task: str) -> Iterator[Fields | ValueError]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{task}: Parquet files need pyarrow; pip install 'echo2[maths]'") from error
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except ArrowException as error:
        raise ConfigError(f"{task}: {file} must be a Parquet file: {error}") from error
