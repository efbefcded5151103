"""Where each tensor's bytes lie in a safetensors file.

Invariant: a layout is a partition: tensors follow one another without overlap or hole from the end of the header to the
end of the file, and every size is the product of its shape and element size in unbounded integers. Nothing is
allocated from a length that the file itself could not hold (E04). Pure: bytes and numbers in, numbers out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from echo2.errors import IntegrityError

ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""safetensors element types with whole bytes per element."""

MAX_HEADER_BYTES = 64 * 1024 * 1024
"""Below the reference reader's own limit of 100 MB; 400,000 tensors fit."""
MAX_DIMENSIONS = 16
MAX_NAME_CHARACTERS = 512

_METADATA = {"format": "pt"}
"""What Hugging Face loaders ask for; with it a snapshot's object is also an ordinary model file."""


class TensorShape(msgspec.Struct, frozen=True, order=True):
    """A tensor without its bytes."""

    name: str
    dtype: str
    """A key of ``ELEMENT_BYTES``."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


class Span(msgspec.Struct, frozen=True):
    """A tensor and where its bytes begin, counted from the start of the file."""

    tensor: TensorShape
    start: int


class Segment(msgspec.Struct, frozen=True):
    """A piece of the body (all tensors' bytes in object order) whose elements have one width."""

    width: int
    """Bytes per element."""
    start: int
    """Counted from the start of the body."""
    nbytes: int

    @property
    def elements(self) -> int:
        return self.nbytes // self.width


def check_tensor(name: str, dtype: str, shape: Sequence[int]) -> TensorShape:
    """Raises IntegrityError for an unknown element type, a negative or absurd shape, an empty or endless name."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise IntegrityError(f"a tensor's name must have 1 to {MAX_NAME_CHARACTERS} characters, got {len(name)}")
    if name == "__metadata__" or not _is_unicode(name):
        raise IntegrityError(f"{name!r} cannot name a tensor: it is reserved or not valid Unicode")
    if dtype not in ELEMENT_BYTES:
        raise IntegrityError(f"tensor {name!r}: element type must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    if len(shape) > MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n < 2**63 for n in shape):
        raise IntegrityError(f"tensor {name!r}: at most {MAX_DIMENSIONS} sizes in [0, 2**63), got {list(shape)[:20]}")
    tensor = TensorShape(name, dtype, tuple(shape))
    if tensor.nbytes >= 2**63:
        raise IntegrityError(f"tensor {name!r}: the product of shape {list(shape)} does not fit 63 bits")
    return tensor


def object_order(tensors: Iterable[TensorShape]) -> list[TensorShape]:
    """Wider element types first, then by name: every tensor is aligned to its own element size."""
    return sorted(tensors, key=lambda t: (-ELEMENT_BYTES[t.dtype], t.name))


def header_bytes(tensors: Iterable[TensorShape]) -> bytes:
    """The one header that these tensors have in a snapshot's object, length field included.

    Same tensors → same bytes, whatever order they come in. Padded with spaces to a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": _METADATA}
    offset = 0
    for tensor in object_order(tensors):
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def spans_of(tensors: Iterable[TensorShape]) -> list[Span]:
    """Where the tensors lie in a snapshot's object, in object order."""
    ordered = object_order(tensors)
    start = len(header_bytes(ordered))
    spans = []
    for tensor in ordered:
        spans.append(Span(tensor, start))
        start += tensor.nbytes
    return spans


def segments_of(tensors: Iterable[TensorShape], segment_bytes: int) -> Iterator[Segment]:
    """The body cut into segments of at most ``segment_bytes``, a multiple of 8; they pay no heed to tensor borders.

    Object order puts equal widths side by side, so small tensors share a segment.
    """
    totals: dict[int, int] = {}
    for tensor in object_order(tensors):
        width = ELEMENT_BYTES[tensor.dtype]
        totals[width] = totals.get(width, 0) + tensor.nbytes
    start = 0
    for width, nbytes in totals.items():
        end = start + nbytes
        for at in range(start, end, segment_bytes):
            yield Segment(width, at, min(segment_bytes, end - at))
        start = end


def header_length(prefix: bytes, file_size: int) -> int:
    """Length of the JSON header from the file's first 8 bytes. Raises IntegrityError before anyone allocates it."""
    if len(prefix) < 8:
        raise IntegrityError(f"a safetensors file has at least 8 bytes, got {len(prefix)}")
    length = int.from_bytes(prefix[:8], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_size - 8):
        most = min(MAX_HEADER_BYTES, max(file_size - 8, 0))
        raise IntegrityError(f"a safetensors header must have 2 to {most} bytes in this file, got {length}")
    return length


def parse_header(text: bytes, file_size: int) -> tuple[list[Span], dict[str, str]]:
    """The JSON header of any safetensors file of ``file_size`` bytes → spans by rising start, and its metadata.

    Raises IntegrityError for duplicate names, overlaps, holes, missing or trailing bytes, overflow, wrong types.
    """
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the safetensors header is not JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise IntegrityError("the safetensors header must be a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise IntegrityError("__metadata__ of a safetensors header must map strings to strings")
    if not all(_is_unicode(text) for pair in metadata.items() for text in pair):
        raise IntegrityError("__metadata__ of a safetensors header must be Unicode, it holds half a surrogate pair")
    begin = 8 + len(text)
    spans = [_span(name, entry, begin) for name, entry in header.items()]
    spans.sort(key=lambda span: (span.start, span.tensor.nbytes))
    expected = begin
    for span in spans:
        if span.start != expected:
            fault = "overlaps the one before it" if span.start < expected else "leaves a hole before it"
            raise IntegrityError(f"tensor {span.tensor.name!r} {fault}: it begins at {span.start}, must at {expected}")
        expected += span.tensor.nbytes
    if expected != file_size:
        raise IntegrityError(f"the tensors end at byte {expected}, the file at {file_size}; they must be equal")
    return spans, metadata


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _span(name: str, entry: Any, begin: int) -> Span:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise IntegrityError(f"tensor {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise IntegrityError(f"tensor {name!r}: dtype, shape or data_offsets has the wrong type")
    tensor = check_tensor(name, dtype, shape)
    first, last = offsets
    if type(first) is not int or type(last) is not int or first < 0 or last - first != tensor.nbytes:
        raise IntegrityError(
            f"tensor {name!r}: data_offsets must be two integers from 0, {tensor.nbytes} bytes apart, got {offsets}"
        )
    return Span(tensor, begin + first)
