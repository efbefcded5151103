"""Messages between a program and its graders: four bytes of length, then msgpack.

Invariant: a frame longer than ``MAX_FRAME_BYTES`` is neither written nor read; nothing that arrives is ever executed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_FRAME_BYTES = 64 * 1024
_LENGTH_BYTES = 4

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
    body = msgspec.msgpack.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message must have at most {MAX_FRAME_BYTES} bytes, got {len(body)}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Inbox:
    """Bytes as they come, whole frames as they go."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes. Raises ValueError for one over the limit or unreadable."""
        self._bytes += data
        frames: list[Frame] = []
        while len(self._bytes) >= _LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:_LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message must have at most {MAX_FRAME_BYTES} bytes, got {length}")
            if len(self._bytes) < _LENGTH_BYTES + length:
                break
            frames.append(_decoder.decode(bytes(self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + length])))
            del self._bytes[: _LENGTH_BYTES + length]
        return frames
