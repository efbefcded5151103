"""Messages between a program and its graders; ``data/frames.py`` says how they travel.

Invariant: an expression and its question never pass ``MAX_FRAME_BYTES``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from echo2.data import frames

MAX_FRAME_BYTES = 64 * 1024

Outcome = Literal["equal", "different", "unreadable", "too_costly", "gold_unreadable", "gold_too_costly", "lost"]
"""What came of one comparison.

unreadable: the answer is no expression. too_costly: it passed a limit of time or memory. lost: the process went for a
reason of its own (killed from outside, or starved of processor time), which is no judgement.
"""
Stage = Literal["gold", "answer", "compare"]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    number: int
    gold: str
    answer: str


class Reached(msgspec.Struct, frozen=True, array_like=True, tag="reached"):
    """From the process that compares: which of its limits runs now."""

    stage: Stage


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    number: int
    outcome: Outcome
    last: bool = False
    """The process that compared ends with this answer: give it nothing more."""


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """The grader cannot work at all."""

    reason: str


Frame = Ask | Reached | Told | Broken
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def packed(frame: Frame) -> bytes:
    """Raises ValueError for a frame over the limit."""
    return frames.packed(frame, MAX_FRAME_BYTES)


class Inbox(frames.Inbox[Frame]):
    def __init__(self) -> None:
        super().__init__(_decoder, MAX_FRAME_BYTES)
