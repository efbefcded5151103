"""Messages between a program and a process that it can kill: four bytes of length, then msgpack.

Invariant: a frame over the limit is neither written nor read; nothing that arrives is ever executed.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 * 2**20
"""A whole problem with its board, or a long conversation's turn; far below what would exhaust a worker."""
LENGTH_BYTES = 4

Frame = TypeVar("Frame")


def packed(frame: msgspec.Struct, most_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Raises ValueError for a frame over the limit, TypeError for values that msgpack does not have."""
    body = msgspec.msgpack.encode(frame)
    if len(body) > most_bytes:
        raise ValueError(f"a message must have at most {most_bytes} bytes, got {len(body)}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class Inbox(Generic[Frame]):
    """Bytes as they come, whole frames of one kind as they go."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Frame], most_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder = decoder
        self._most_bytes = most_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes. Raises ValueError for one over the limit or unreadable."""
        self._bytes += data
        frames: list[Frame] = []
        while len(self._bytes) >= LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
            if length > self._most_bytes:
                raise ValueError(f"a message must have at most {self._most_bytes} bytes, got {length}")
            if len(self._bytes) < LENGTH_BYTES + length:
                break
            frames.append(self._decoder.decode(bytes(self._bytes[LENGTH_BYTES : LENGTH_BYTES + length])))
            del self._bytes[: LENGTH_BYTES + length]
        return frames
