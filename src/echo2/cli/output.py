"""What commands print.

Invariant: with ``--json`` standard output is one JSON object and nothing else; people read standard error then.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, e.g. learning.lr=1e-6; repeatable."),
]


def print_json(value: Mapping[str, Any]) -> None:
    """One line of strict JSON: a number that JSON cannot write becomes null."""
    print(json.dumps(_strict(value), ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What a task's own code prints meanwhile, and the processes that it starts, goes to standard error."""
    sys.stdout.flush()
    kept = None
    with contextlib.suppress(OSError, ValueError):  # where standard output is no descriptor, Python's own is all
        if sys.stdout.fileno() == 1:
            kept = os.dup(1)
            os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def note(text: str) -> None:
    """A line for people that must not disturb standard output."""
    print(text, file=sys.stderr)


def show(what: RenderableType, *, least_columns: int = 1) -> None:
    """Tables for people; without blanks at the ends of lines where no terminal reads them.

    least_columns: below that many, ``what`` would lose figures; a narrower terminal breaks its lines instead.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, least_columns)
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as printed:
        console.print(what)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return str(value) if isinstance(value, str) else value
    return str(value) if isinstance(value, Path) else repr(value)
