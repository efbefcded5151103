"""Whole snapshots as compressed byte planes.

Invariant: decoding gives back the body's bytes, whatever they are. Byte k of every element of a segment forms plane k;
the upper planes of floating weights (sign, exponent) compress well, the lower ones are noise and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from echo2.broadcast.body import Body, Contents, Weights, open_snapshot, page_aligned
from echo2.broadcast.changes import Bits
from echo2.broadcast.layout import Segment, TensorShape, segments_of
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import PLANES
from echo2.broadcast.wire import ObjectReader, Packer, wire_manifest, write_object
from echo2.errors import IntegrityError
from echo2.types import SnapshotKind

MAGIC = b"echo2pl1"
SEGMENT_BYTES = 1024 * 1024
"""A segment, its planes and the compressor's tables stay in the cache."""


_EXCERPTS = 32
_EXCERPT_BYTES = 32 * 1024


def write_anchor(folder: Path, out: Path) -> Manifest:
    """Encode the raw snapshot in ``folder`` as file ``out``, whole or absent; return the unsigned manifest.

    Raises IntegrityError for a folder that is no complete snapshot, DiskFull.
    """
    weights = open_snapshot(folder)
    with weights.body:
        return encode_anchor(weights, out)


def encode_anchor(weights: Weights, out: Path) -> Manifest:
    segments = segments_of(shapes_of(weights.contents), SEGMENT_BYTES)
    write_object(out, MAGIC, _records(weights.body, segments))
    return wire_manifest(weights.contents, out, SnapshotKind.ANCHOR, PLANES)


def decode_anchor(reader: ObjectReader, of: Contents) -> Iterator[memoryview]:
    """The body, a block at a time; a block is valid until the next is asked for. Raises IntegrityError."""
    buffer = page_aligned(SEGMENT_BYTES)
    for segment in segments_of(shapes_of(of), SEGMENT_BYTES):
        planes = reader.record([segment.elements] * segment.width)
        block = buffer[: segment.nbytes]
        _join(planes, block.view(f"<u{segment.width}"))
        yield block.data
    reader.end()


def shapes_of(contents: Contents) -> list[TensorShape]:
    return [TensorShape(t.name, t.dtype, t.shape) for t in contents.tensors]


def estimated_bytes(weights: Weights) -> int:
    """About the size of the weights' anchor, from excerpts spread over the body."""
    segments = list(segments_of(shapes_of(weights.contents), SEGMENT_BYTES))
    chosen = segments[:: -(-len(segments) // _EXCERPTS)] if segments else []
    excerpts = [Segment(s.width, s.start, min(s.nbytes, _EXCERPT_BYTES)) for s in chosen]
    read = sum(excerpt.nbytes for excerpt in excerpts)
    packed = sum(len(record) for record in _records(weights.body, excerpts))
    return packed * weights.body.nbytes // read if read else 0


def _records(body: Body, segments: Iterable[Segment]) -> Iterator[bytes]:
    packer = Packer()
    buffer = page_aligned(SEGMENT_BYTES)
    for segment in segments:
        block = buffer[: segment.nbytes]
        body.read(segment.start, block.data)
        yield packer.record(_planes(block.view(f"<u{segment.width}")))


def _planes(words: Bits) -> list[memoryview]:
    """[n] words → planes of n bytes, lowest first."""
    return [(words >> words.dtype.type(8 * k)).astype(np.uint8).data for k in range(words.itemsize)]


def _join(planes: Sequence[bytes], words: Bits) -> None:
    """Inverse of ``_planes``, into ``words``. Raises IntegrityError for a plane that is too short."""
    for k, plane in reversed(list(enumerate(planes))):
        if len(plane) != len(words):
            raise IntegrityError(f"a plane of {len(words)} elements must have as many bytes, got {len(plane)}")
        values = np.frombuffer(plane, np.uint8)
        if k == words.itemsize - 1:
            np.left_shift(values, words.dtype.type(8 * k), out=words, dtype=words.dtype)
        elif k == 0:
            words |= values
        else:
            words |= values.astype(words.dtype) << words.dtype.type(8 * k)
