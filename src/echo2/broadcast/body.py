"""The bytes of all tensors in object order, wherever they lie.

Invariant: byte i of a ``Body`` is the same for a packed snapshot and for the sharded files it could be packed from.
Bytes are read, never mapped: a file that shrinks under a reader is an error then, not a fatal signal, and memory stays
with the blocks in hand.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from echo2.broadcast.layout import header_bytes
from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.broadcast.snapshot import load_manifest, spans_of_manifest
from echo2.errors import IntegrityError
from echo2.transport.partial import OBJECT_NAME
from echo2.types import Policy


class Piece(msgspec.Struct, frozen=True):
    """A stretch of a file."""

    file: Path
    start: int
    nbytes: int


class Contents(msgspec.Struct, frozen=True):
    """What a manifest says about tensors, however they are packed."""

    run_id: str
    policy: Policy
    decoded_root: str
    tensors: tuple[TensorEntry, ...]
    """By name."""
    aliases: dict[str, str]
    dtype: str

    def fit(self, other: Contents) -> bool:
        """Whether both have the same tensors in the same layout, so that one can be a base of the other."""
        return [(t.name, t.dtype, t.shape) for t in self.tensors] == [(t.name, t.dtype, t.shape) for t in other.tensors]


class Body:
    """Pieces of files that are read as one. Close it, or use it as a context."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = [piece for piece in pieces if piece.nbytes]
        self._starts: list[int] = []
        self._open: dict[Path, int] = {}
        self.nbytes = 0
        for piece in self._pieces:
            self._starts.append(self.nbytes)
            self.nbytes += piece.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, start: int, into: memoryview) -> None:
        """Fill ``into`` (format ``B``) with the bytes from ``start`` on. Raises IntegrityError when files end early."""
        number = bisect_right(self._starts, start) - 1
        while into:
            piece = self._pieces[number]
            skipped = start - self._starts[number]
            part = into[: piece.nbytes - skipped]
            self._fill(piece, skipped, part)
            start += len(part)
            into = into[len(part) :]
            number += 1

    def _fill(self, piece: Piece, skipped: int, into: memoryview) -> None:
        if piece.file not in self._open:
            self._open[piece.file] = os.open(piece.file, os.O_RDONLY)
        at = piece.start + skipped
        while into:
            count = os.preadv(self._open[piece.file], [into], at)
            if not count:
                raise IntegrityError(f"{piece.file} must have more than {at} bytes; it was cut or changed")
            at += count
            into = into[count:]


class Weights(NamedTuple):
    contents: Contents
    body: Body


def page_aligned(nbytes: int) -> NDArray[np.uint8]:
    """A buffer to read files into.

    The string copy of some processors, which the kernel uses, is five times slower when the destination lies a few
    bytes further into its page than the source does into its own; that is where ``malloc`` puts large blocks.
    """
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def contents_of(manifest: Manifest) -> Contents:
    return Contents(
        manifest.run_id, manifest.policy, manifest.decoded_root, manifest.tensors, manifest.aliases, manifest.dtype
    )


def open_snapshot(folder: Path) -> Weights:
    """A raw snapshot folder as contents and body. Raises IntegrityError for one that is not complete."""
    manifest = load_manifest(folder)
    file = folder / OBJECT_NAME
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise IntegrityError(f"{folder} is no complete snapshot: it has no {OBJECT_NAME}") from None
    if manifest.codec != "raw" or size != manifest.object_size:
        raise IntegrityError(f"{file} must be the raw object of {manifest.object_size} bytes, got {size}")
    begin = len(header_bytes(span.tensor for span in spans_of_manifest(manifest)))
    return Weights(contents_of(manifest), Body([Piece(file, begin, size - begin)]))
