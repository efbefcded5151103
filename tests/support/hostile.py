"""safetensors files that no reader may accept (field report E04)."""

from __future__ import annotations

import json


def file_of(header: str, body: bytes = b"", length: int | None = None) -> bytes:
    """A file of this header and body; ``length``: what the first eight bytes claim instead of the header's length."""
    text = header.encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(first: int, last: int, shape: list[int] | None = None, dtype: str = "U8") -> str:
    shape = [last - first] if shape is None else shape
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [first, last]})


GOOD = f'{{"a":{entry(0, 4)}}}'
HOSTILE = {
    "header length 2**63-1": file_of(GOOD, bytes(4), length=2**63 - 1),
    "header length 100,000,001": file_of(GOOD, bytes(4), length=100_000_001),
    "header length 0": file_of("", length=0),
    "seven bytes": bytes(7),
    "duplicate names": file_of(f'{{"a":{entry(0, 4)},"a":{entry(4, 8)}}}', bytes(8)),
    "overlapping ranges": file_of(f'{{"a":{entry(0, 4)},"b":{entry(2, 6)}}}', bytes(6)),
    "a hole": file_of(f'{{"a":{entry(0, 4)},"b":{entry(6, 10)}}}', bytes(10)),
    "a trailing byte": file_of(GOOD, bytes(5)),
    "the last byte missing": file_of(GOOD, bytes(3)),
    "shape overflow": file_of(f'{{"a":{entry(0, 0, [2**40, 2**40], "F32")}}}'),
    "negative offset": file_of(f'{{"a":{entry(-4, 0)}}}', bytes(4)),
}
