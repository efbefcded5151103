from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from echo2.broadcast.layout import TensorShape, check_tensor, header_bytes, header_length, parse_header, spans_of
from echo2.errors import IntegrityError


def read(data: bytes) -> list[str]:
    """Names in a whole file's bytes, in file order."""
    length = header_length(data[:8], len(data))
    spans, _ = parse_header(data[8 : 8 + length], len(data))
    return [span.tensor.name for span in spans]


def file_of(header: str, body: bytes = b"", length: int | None = None) -> bytes:
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


@pytest.mark.parametrize("kind", HOSTILE)
def test_e04_a_hostile_header_is_refused_in_a_sentence_as_the_reference_reader_refuses_it(
    kind: str, tmp_path: Path
) -> None:
    data = HOSTILE[kind]
    with pytest.raises(IntegrityError):
        read(data)
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(SafetensorError), safe_open(tmp_path / "x.safetensors", "np"):
        pass


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"__metadata__":{"a":1}}',
        '{"a":1}',
        '{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"Q8","shape":[1],"data_offsets":[0,1]}}',
        '{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        "[" * 100_000,
    ],
)
def test_e04_a_header_of_the_wrong_form_is_refused(header: str) -> None:
    with pytest.raises(IntegrityError):
        read(file_of(header, b"x"))


def test_an_ordinary_file_is_read_in_file_order() -> None:
    data = file_of(f'{{"b":{entry(4, 8)},"a":{entry(0, 4)},"empty":{entry(4, 4)}}}', bytes(8))
    assert read(data) == ["a", "empty", "b"]


def test_a_header_does_not_depend_on_the_order_of_tensors_and_aligns_each_to_its_element() -> None:
    shapes = [TensorShape("z", "F64", (1,)), TensorShape("a", "U8", (3,)), TensorShape("m", "BF16", (5,))]
    assert header_bytes(shapes) == header_bytes(reversed(shapes))
    assert len(header_bytes(shapes)) % 8 == 0
    spans = spans_of(shapes)
    assert [span.tensor.name for span in spans] == ["z", "m", "a"]
    assert spans[0].start % 8 == 0
    assert spans[1].start % 2 == 0


def test_names_that_look_like_paths_are_only_labels() -> None:
    assert check_tensor("../../x", "U8", [1]).name == "../../x"
    with pytest.raises(IntegrityError, match="reserved"):
        check_tensor("__metadata__", "U8", [1])
