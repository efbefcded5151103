"""A snapshot as what changed since an older one.

Invariant (I6): a delta turns exactly one base, named by its decoded root, into exactly one result, named by its own;
both are in the manifest, and the result's bytes are compared with it tensor by tensor as they are made. A delta that
would not be smaller than an anchor is not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo2.broadcast.body import Body, Contents, Weights, open_snapshot, page_aligned
from echo2.broadcast.changes import (
    Changes,
    Differences,
    FindChanges,
    decode_changes,
    encode_changes,
)
from echo2.broadcast.layout import Segment, segments_of
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import DELTA
from echo2.broadcast.planes import estimated_bytes, shapes_of
from echo2.broadcast.wire import ObjectReader, Packer, wire_manifest, write_object
from echo2.types import SnapshotKind

MAGIC = b"echo2dl1"
SEGMENT_BYTES = 8 * 1024 * 1024
"""Enough changes for a histogram at 0.1 %; at 100 % its indices still take only some tens of megabytes."""
_BLOCK_BYTES = 1024 * 1024
"""Of a segment that is decoded: what the threads that hash and write it take at a time."""


class _TooLarge(Exception):
    """An anchor would be smaller."""


def write_delta(
    base_folder: Path, new_folder: Path, out: Path, *, changes: FindChanges = encode_changes
) -> Manifest | None:
    """Encode raw snapshot ``new_folder`` against raw snapshot ``base_folder`` as file ``out``, whole or absent.

    changes: who compares a segment's words; any implementation gives the same bytes.
    Returns the unsigned manifest; None, and no file, when an anchor is smaller or the tensors differ in name, type or
    shape. Raises IntegrityError for a folder that is no complete snapshot or a base that is not older, DiskFull.
    """
    base, new = open_snapshot(base_folder), open_snapshot(new_folder)
    with base.body, new.body:
        return encode_delta(base, new, out, changes=changes)


def encode_delta(base: Weights, new: Weights, out: Path, *, changes: FindChanges = encode_changes) -> Manifest | None:
    """``write_delta`` of weights wherever they lie."""
    if not base.contents.fit(new.contents):
        return None
    segments = segments_of(shapes_of(new.contents), SEGMENT_BYTES)
    try:
        write_object(out, MAGIC, _records(base.body, new.body, segments, changes, estimated_bytes(new)))
    except _TooLarge:
        return None
    kind, at = SnapshotKind.DELTA, base.contents
    return wire_manifest(new.contents, out, kind, DELTA, at.policy, at.decoded_root)


def decode_delta(reader: ObjectReader, of: Contents, base: Body) -> Iterator[memoryview]:
    """The new body, a block at a time; a block is valid until the next is asked for. Raises IntegrityError."""
    buffer = page_aligned(_BLOCK_BYTES)
    for segment in segments_of(shapes_of(of), SEGMENT_BYTES):
        limits = [segment.elements, segment.elements, segment.nbytes]
        differences = decode_changes(Changes(*reader.record(limits)), segment.elements, segment.width)
        yield from _patched(segment, differences, base, buffer)
    reader.end()


def _patched(segment: Segment, differences: Differences, base: Body, buffer: NDArray[np.uint8]) -> Iterator[memoryview]:
    """Blocks of the segment: the base's bytes with the differences added."""
    step = _BLOCK_BYTES // segment.width
    starts = range(0, segment.elements, step)
    cuts = [*np.searchsorted(differences.positions, np.asarray(starts)).tolist(), len(differences.positions)]
    for number, first in enumerate(starts):
        block = buffer[: min(step, segment.elements - first) * segment.width]
        base.read(segment.start + first * segment.width, block.data)
        within = slice(cuts[number], cuts[number + 1])
        words = block.view(f"<u{segment.width}")
        words[differences.positions[within] - first] += differences.values[within]
        yield block.data


def _records(
    base: Body, new: Body, segments: Iterable[Segment], changes: FindChanges, limit_bytes: int
) -> Iterator[bytes]:
    """One record per segment. Raises _TooLarge as soon as together they have more than ``limit_bytes``."""
    packer = Packer()
    old, now = page_aligned(SEGMENT_BYTES), page_aligned(SEGMENT_BYTES)
    for segment in segments:
        sides = []
        for body, buffer in ((base, old), (new, now)):
            body.read(segment.start, buffer[: segment.nbytes].data)
            sides.append(buffer[: segment.nbytes].view(f"<u{segment.width}"))
        record = packer.record(changes(*sides))
        limit_bytes -= len(record)
        if limit_bytes < 0:
            raise _TooLarge
        yield record
