"""What differs between two arrays of bits, as three short streams of bytes.

Invariant: ``decode_changes`` of ``encode_changes`` gives back the new array bit for bit, whatever the bits mean: NaN
payloads, signed zeros and integers are all just words. Streams from elsewhere are checked against the array's length
before an index is used. Pure.

Per changed element, in order (broadcast notes §4; escapes and the third stream are ours):

``gaps``   u8: unchanged elements before it; 255 stands for 255 unchanged elements and says that more follow.
``small``  u8: zigzag of (new bits − base bits), wrapped to the element's width; 255 sends the reader to ``large``.
``large``  zigzag values from 255 on, by byte planes: all lowest bytes, then all next ones …
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echo2.errors import IntegrityError

Bits = NDArray[np.unsignedinteger[Any]]
"""[elements] little-endian words of 1, 2, 4 or 8 bytes."""

ESCAPE = 255
BLOCK_BYTES = 512 * 1024
"""Two such blocks stay in a core's cache between the comparison and the gathering of what differs."""


class Changes(NamedTuple):
    gaps: bytes
    small: bytes
    """One byte per changed element."""
    large: bytes


FindChanges = Callable[[Bits, Bits], tuple[bytes, bytes, bytes]]
"""(base, new) → gaps, small, large; every implementation gives the same bytes as ``encode_changes``."""


class Differences(NamedTuple):
    positions: NDArray[np.intp]
    """[changes] rising indices of the elements that differ."""
    values: Bits
    """[changes] what to add to the base's bits, modulo their width."""


def encode_changes(base: Bits, new: Bits) -> Changes:
    """[n], [n] contiguous, of one type → what turns ``base`` into ``new``."""
    positions, values = differences_of(base, new)
    zigzag = _zigzag(values)
    small = np.minimum(zigzag, ESCAPE).astype(np.uint8)
    return Changes(_gap_bytes(positions), small.tobytes(), _planes(zigzag[zigzag >= ESCAPE]))


def differences_of(base: Bits, new: Bits) -> Differences:
    """[n], [n] contiguous, of one type → where and by how much they differ."""
    step = BLOCK_BYTES // base.itemsize
    parts = []
    for start in range(0, len(base), step):
        positions, values = _block_differences(base[start : start + step], new[start : start + step])
        positions += start
        parts.append((positions, values))
    if not parts:
        return Differences(np.empty(0, np.intp), new[:0])
    return Differences(np.concatenate([p for p, _ in parts]), np.concatenate([v for _, v in parts]))


def decode_changes(changes: Changes, elements: int, width: int) -> Differences:
    """Inverse of ``encode_changes`` for an array of ``elements`` words of ``width`` bytes. Raises IntegrityError."""
    gaps = np.frombuffer(changes.gaps, np.uint8)
    ends = gaps != ESCAPE
    # An escape skips 255 elements, anything else its own number and the changed element: both fit a byte.
    reached = np.cumsum(gaps + ends, dtype=np.intp)
    if len(reached) and reached[-1] > elements:
        raise IntegrityError(f"changes must lie within {elements} elements, they reach {reached[-1]}")
    positions = reached if ends.all() else reached[ends]
    positions -= 1
    zigzag = np.frombuffer(changes.small, np.uint8).astype(f"u{width}")
    if len(positions) != len(zigzag):
        raise IntegrityError(f"{len(positions)} changed elements must have as many differences, got {len(zigzag)}")
    escaped = np.flatnonzero(zigzag == ESCAPE)
    if len(escaped) * width != len(changes.large):
        raise IntegrityError(f"{len(escaped)} large differences take {width} bytes each, got {len(changes.large)}")
    if len(escaped):
        planes = np.frombuffer(changes.large, np.uint8).reshape(width, len(escaped))
        zigzag[escaped] = np.ascontiguousarray(planes.T).view(f"u{width}")[:, 0]
    return Differences(positions, _unzigzag(zigzag))


def _block_differences(base: Bits, new: Bits) -> tuple[NDArray[np.intp], Bits]:
    """Whole 8-byte words are compared first, since most are equal; then the elements of those that are not."""
    per_word = 8 // base.itemsize
    whole = len(base) - len(base) % per_word
    old_words, new_words = base[:whole].view(np.uint64), new[:whole].view(np.uint64)
    words = np.flatnonzero(old_words != new_words)
    values = new_words.take(words).view(base.dtype) - old_words.take(words).view(base.dtype)
    lanes = np.flatnonzero(values != 0)
    shift = per_word.bit_length() - 1
    positions = words.take(lanes >> shift)
    positions <<= shift
    positions += lanes & (per_word - 1)
    if whole == len(base):
        return positions, values.take(lanes)
    rest = new[whole:] - base[whole:]
    extra = np.flatnonzero(rest)
    return np.concatenate([positions, extra + whole]), np.concatenate([values.take(lanes), rest[extra]])


def _gap_bytes(positions: NDArray[np.intp]) -> bytes:
    """[changes] rising indices → the gap stream."""
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    long = np.flatnonzero(gaps >= ESCAPE)
    if not len(long):
        return gaps.astype(np.uint8).tobytes()
    escapes = gaps.take(long) // ESCAPE
    gaps[long] -= escapes * ESCAPE
    lengths = np.ones(len(gaps), np.intp)
    lengths[long] += escapes
    ends = np.cumsum(lengths)
    stream = np.full(ends[-1], ESCAPE, np.uint8)
    ends -= 1
    stream[ends] = gaps
    return stream.tobytes()


def _zigzag(differences: Bits) -> Bits:
    """0, −1, 1, −2 … → 0, 1, 2, 3 …, on the words' own width."""
    signed = differences.view(f"i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _unzigzag(zigzag: Bits) -> Bits:
    one = zigzag.dtype.type(1)
    return (zigzag >> one) ^ (np.zeros_like(zigzag) - (zigzag & one))


def _planes(values: Bits) -> bytes:
    """Byte planes of the values; small numbers leave the upper planes empty, which compresses to nothing."""
    return values.view(np.uint8).reshape(len(values), values.itemsize).T.tobytes()
