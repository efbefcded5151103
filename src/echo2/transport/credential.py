"""What enrolment gave, kept between lives of a program.

Invariant: the file is readable by its owner only, and belongs to one join string: with another one, the program enrols
anew instead of presenting one run's credential to another.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from blake3 import blake3

from echo2.durable import write_file
from echo2.transport.join import JoinString
from echo2.transport.messages import Enrolled


class _Kept(msgspec.Struct, frozen=True):
    join: str
    """blake3 of the join string: enough to compare, nothing to steal."""
    enrolled: Enrolled


def load_credential(path: Path, join: JoinString) -> Enrolled | None:
    """What an earlier life stored for this join string; None when there is nothing usable."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return kept.enrolled if kept.join == _digest(join) else None


def store_credential(path: Path, join: JoinString, enrolled: Enrolled) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, msgspec.json.encode(_Kept(_digest(join), enrolled)), 0o600)


def _digest(join: JoinString) -> str:
    return blake3(str(join).encode()).hexdigest()
