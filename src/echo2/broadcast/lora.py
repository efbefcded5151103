"""A snapshot as low-rank adapters of an older one (LoRA, arXiv 2106.09685).

Invariant (I6): adapters turn exactly one base into exactly one result, as a delta does, and the same bytes come out on
every machine: products are added one rank after the other in float32, elementwise, so that no library chooses the
order, and then rounded once. The object is a safetensors file with PEFT's names, which others load as it is; what its
header claims is held against the base before anything is computed.

    result = round(W + Σₖ (alpha / rank · B[:, k]) A[k, :])        one row of W after the other
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from echo2.broadcast.body import Body, Contents, contents_of, page_aligned
from echo2.broadcast.layout import TensorShape, header_length, object_order, parse_header
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import LORA
from echo2.broadcast.planes import shapes_of
from echo2.broadcast.wire import wire_manifest
from echo2.cores import own_threads
from echo2.durable import ASIDE, room_for, sync_folder, write_all
from echo2.errors import IntegrityError
from echo2.types import Policy, SnapshotKind

ADAPTER_NAME = "adapter_model.safetensors"
"""PEFT's."""
SCALE = "lora_alpha"
"""Of the object's metadata: alpha as text; the rank is a shape."""

Floats = NDArray[np.float32]
_BLOCK_BYTES = 1024 * 1024
"""Of the base that is copied, and about so much that is computed by one core."""
_BLOCKS_AT_ONCE = 32
_CACHED_ELEMENTS = 32 * 1024
"""Of a matrix that is added to again and again: it stays in a core's cache meanwhile."""
_PART = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FLOATS = ("BF16", "F16", "F32")


class Pair(msgspec.Struct, frozen=True):
    """What is added to one matrix."""

    down: Floats
    """[rank, columns] A"""
    up: Floats
    """[rows, rank] alpha / rank · B"""


def lora_manifest(raw: Manifest, object_path: Path, base: Contents) -> Manifest:
    """Describe adapters that turn ``base`` into the raw snapshot. Raises IntegrityError when they are no smaller."""
    kind, of = SnapshotKind.DELTA, contents_of(raw)
    return wire_manifest(of, object_path, kind, LORA, base.policy, base.decoded_root)


def read_adapters(path: Path, size: int, start: int = 0) -> dict[str, Pair]:
    """Adapters by the name of the matrix, from a file in which the object lies at ``start``. Raises IntegrityError."""
    with path.open("rb") as file:
        file.seek(start)
        head = file.read(8)
        length = header_length(head, size)
        text = file.read(length)
        spans, metadata = parse_header(text, size)
        try:
            alpha = float(metadata[SCALE])
        except (KeyError, ValueError):
            alpha = math.nan
        if not (math.isfinite(alpha) and alpha > 0):
            raise IntegrityError(f"{path.name}: the adapters must say a positive {SCALE}")
        parts: dict[str, dict[str, Floats]] = {}
        for span in spans:
            name, side = _part(span.tensor)
            file.seek(start + span.start)
            data = file.read(span.tensor.nbytes)
            if len(data) != span.tensor.nbytes:
                raise IntegrityError(f"{path.name} must have {size} bytes from byte {start} on; it was cut")
            values = widened(np.frombuffer(data, np.uint8), span.tensor.dtype)
            parts.setdefault(name, {})[side] = values.reshape(span.tensor.shape)
    return {name: _pair(name, sides, alpha) for name, sides in parts.items()}


def decode_lora(adapters: Mapping[str, Pair], of: Contents, base: Body) -> Iterator[memoryview]:
    """The new body, a block at a time; a block is valid until the next is asked for.

    base: the body of a snapshot with the same layout as ``of``. Raises IntegrityError when the adapters are another
    model's, before anything is computed.
    """
    shapes = object_order(shapes_of(of))
    check_fit(adapters, shapes)
    start = 0
    for shape in shapes:
        yield from blocks_of(shape, adapters.get(shape.name), base, start)
        start += shape.nbytes


def blocks_of(shape: TensorShape, pair: Pair | None, base: Body, start: int) -> Iterator[memoryview]:
    """One tensor's bytes: the base's, which begin at ``start`` of its body, with the adapter added where it has one."""
    if pair is not None:
        yield from _adapted(shape, pair, base, start)
        return
    buffer = page_aligned(_BLOCK_BYTES)
    for at in range(start, start + shape.nbytes, _BLOCK_BYTES):
        block = buffer[: min(_BLOCK_BYTES, start + shape.nbytes - at)].data
        base.read(at, block)
        yield block


def check_fit(adapters: Mapping[str, Pair], shapes: list[TensorShape]) -> None:
    """Raises IntegrityError unless each pair is of a floating matrix among the tensors."""
    matrices = {shape.name: shape for shape in shapes if len(shape.shape) == 2 and shape.dtype in _FLOATS}
    for name, pair in adapters.items():
        wanted = (pair.up.shape[0], pair.down.shape[1])
        if name not in matrices or matrices[name].shape != wanted:
            raise IntegrityError(f"adapters of shape {list(wanted)} are for {name!r}, which the base does not have so")


def adapted_rows(weight: Floats, pair: Pair, first: int) -> Floats:
    """[n, columns] rows of the matrix from ``first`` on → the same rows with the adapter added, in float32."""
    up = pair.up[first : first + len(weight)]
    total, term = np.zeros_like(weight), np.empty_like(weight)
    for k in range(up.shape[1]):
        np.multiply(up[:, k, None], pair.down[k], out=term)
        total += term
    total += weight
    return total


def widened(data: NDArray[np.uint8], dtype: str) -> Floats:
    """Little-endian bytes of floats as float32; exact."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f2" if dtype == "F16" else "<f4").astype(np.float32)


def rounded(values: Floats, dtype: str) -> NDArray[np.uint8]:
    """float32 → bytes of ``dtype``, to the nearest, ties to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        near = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        return np.where(np.isnan(values), np.uint32(0x7FC0), near).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype("<f2" if dtype == "F16" else "<f4").view(np.uint8)


def write_adapters(tensors: Mapping[str, Any], alpha: float, policy: Policy, out: Path) -> None:
    """Write adapters as file ``out``, whole or absent, for ``read_adapters`` and for PEFT. Raises DiskFull.

    tensors: PEFT's name → (safetensors element type, shape, what reads its bytes).  policy: two versions are two
    objects, also when nothing was learnt between them.
    """
    shapes = [TensorShape(name, dtype, tuple(shape)) for name, (dtype, shape, _) in tensors.items()]
    header: dict[str, Any] = {"__metadata__": {"format": "pt", SCALE: repr(alpha), "policy": str(policy)}}
    end = 0
    for shape in object_order(shapes):
        begin, end = end, end + shape.nbytes
        header[shape.name] = {"dtype": shape.dtype, "shape": list(shape.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = out.with_name(out.name + ASIDE)
    with room_for(out):
        with aside.open("wb", buffering=0) as file:
            write_all(file.fileno(), len(text).to_bytes(8, "little") + text)
            for shape in object_order(shapes):
                write_all(file.fileno(), tensors[shape.name][2]())
        aside.replace(out)
        sync_folder(out.parent)


def _adapted(shape: TensorShape, pair: Pair, base: Body, start: int) -> Iterator[memoryview]:
    """Blocks of one matrix; the cores share them, and their order is that of the rows."""
    rows, columns = shape.shape
    width = shape.nbytes // (rows * columns) if rows * columns else 1
    step = max(1, _BLOCK_BYTES // max(1, columns * width))

    def read(first: int) -> NDArray[np.uint8]:
        data = np.empty(min(step, rows - first) * columns * width, np.uint8)
        base.read(start + first * columns * width, data.data)
        return data

    def block(first: int, data: NDArray[np.uint8]) -> memoryview:
        weight = widened(data, shape.dtype).reshape(-1, columns)
        at_once = max(1, _CACHED_ELEMENTS // max(1, columns))
        for row in range(0, len(weight), at_once):
            weight[row : row + at_once] = adapted_rows(weight[row : row + at_once], pair, first + row)
        return rounded(weight.reshape(-1), shape.dtype).data

    with ThreadPoolExecutor(own_threads()) as cores:
        for begin in range(0, rows, step * _BLOCKS_AT_ONCE):
            firsts = range(begin, min(rows, begin + step * _BLOCKS_AT_ONCE), step)
            yield from cores.map(block, firsts, map(read, firsts))


def _part(tensor: TensorShape) -> tuple[str, str]:
    match = _PART.fullmatch(tensor.name)
    if not match or len(tensor.shape) != 2 or tensor.dtype not in _FLOATS:
        raise IntegrityError(f"adapters must be floating matrices A and B of linear layers, got {tensor.name[:80]!r}")
    return f"{match[1]}.weight", match[2]


def _pair(name: str, sides: Mapping[str, Floats], alpha: float) -> Pair:
    if sides.keys() != {"A", "B"} or len(sides["A"]) != sides["B"].shape[1] or not len(sides["A"]):
        raise IntegrityError(f"the adapter of {name[:80]!r} must have A of shape [rank, in] and B of shape [out, rank]")
    scale = np.float32(alpha / len(sides["A"]))
    return Pair(sides["A"], sides["B"] * scale)
