"""One stream as its parent sees it: what goes next.

Invariant: on one stream a chunk is sent at most once, only when it is here, and never one that the child said it has.
The order is the child's: its stretches, then, when the stream spills, everything else in the same direction. Pure.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from echo2.broadcast.plan.model import Stretch
from echo2.errors import Malformed
from echo2.types import Policy


class Serving:
    def __init__(
        self,
        root: str,
        policy: Policy,
        stream: int,
        order: Sequence[int],
        child_has: bytearray,
        here: bytearray,
        pace_bytes_per_s: float = 0.0,
    ) -> None:
        """child_has, here: one byte per chunk, 1 for had; ``child_has`` becomes this stream's own."""
        self.root = root
        self.policy = policy
        self.stream = stream
        self.pace_bytes_per_s = pace_bytes_per_s
        numbers, places = np.asarray(order, np.int32), np.full(len(child_has), -1, np.int32)
        places[numbers] = np.arange(len(numbers), dtype=np.int32)
        wanted = np.frombuffer(here, np.uint8).astype(bool) & ~np.frombuffer(child_has, np.uint8).astype(bool)
        self._order, self._places = array("i", numbers.tobytes()), array("i", places.tobytes())
        """Packed, since a peer may ask for many streams of many chunks. A chunk without a place has -1."""
        self._over = child_has
        self._first = array("i", np.flatnonzero(wanted[numbers])[::-1].astype(np.int32).tobytes())
        """Places of chunks that were here from the start, the next one last."""
        self._ready: list[int] = []
        """Heap of the places of those that came since."""

    def arrived(self, number: int) -> bool:
        """The parent got this chunk; whether that gives the stream something to send."""
        place = self._places[number]
        if place < 0 or self._over[number]:
            return False
        heapq.heappush(self._ready, place)
        return True

    def child_got(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number < len(self._over):
                self._over[number] = 1

    def next(self) -> int | None:
        """The chunk to send now."""
        while self._first or self._ready:
            from_start = bool(self._first) and not (self._ready and self._ready[0] < self._first[-1])
            number = self._order[self._first.pop() if from_start else heapq.heappop(self._ready)]
            if not self._over[number]:
                self._over[number] = 1
                return number
        return None

    @property
    def backlog(self) -> int:
        """Chunks that could be sent now, at most."""
        return len(self._first) + len(self._ready)


def order_of(stretches: Sequence[Stretch], spills: bool, count: int) -> list[int]:
    """Every chunk that the stream may carry, once, in order. Raises Malformed for stretches beyond the object."""
    parts = [np.empty(0, np.int64)]
    if sum(stretch.count for stretch in stretches) > count:
        raise Malformed(f"the stretches of a stream must not overlap, got more than the object's {count} chunks")
    for stretch in stretches:
        numbers = stretch.numbers() if abs(stretch.step) == 1 and 0 <= stretch.count <= count else range(-1, 0)
        if numbers and not (0 <= numbers[0] < count and 0 <= numbers[-1] < count):
            raise Malformed(f"a stretch must lie within the object's {count} chunks, got {stretch}")
        if numbers:
            parts.append(np.arange(numbers.start, numbers.stop, numbers.step))
    if spills:
        parts.append(_rest(stretches, count))
    numbers_in_turn = np.concatenate(parts)
    turns = np.arange(len(numbers_in_turn))
    first_turn = np.empty(count, np.int64)
    first_turn[numbers_in_turn[::-1]] = turns[::-1]  # of a chunk that is there twice the earlier turn is written last
    order: list[int] = numbers_in_turn[first_turn[numbers_in_turn] == turns].tolist()
    return order


def _rest(stretches: Sequence[Stretch], count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All chunks, onwards from where the last stretch ended, around the object."""
    if not stretches:
        return np.arange(count)
    last = stretches[-1]
    end = last.first + last.count * last.step
    return (end % count + last.step * np.arange(count)) % count


def pack_flags(flags: bytearray) -> bytes:
    """One byte per chunk → one bit per chunk."""
    return np.packbits(np.frombuffer(flags, np.uint8), bitorder="little").tobytes()


def unpack_flags(bitmap: bytes, count: int) -> bytearray:
    """A bitmap from the network; empty means nothing is had. Raises Malformed for any other wrong length."""
    if not bitmap:
        return bytearray(count)
    if len(bitmap) != (count + 7) // 8:
        raise Malformed(f"a have-bitmap of {count} chunks has {(count + 7) // 8} bytes, got {len(bitmap)}")
    return bytearray(np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little").tobytes())
