from __future__ import annotations

from pathlib import Path

import pytest
from hostile import HOSTILE, entry, file_of
from safetensors import SafetensorError, safe_open

from echo2.broadcast.layout import TensorShape, check_tensor, header_bytes, header_length, parse_header, spans_of
from echo2.errors import IntegrityError


def read(data: bytes) -> list[str]:
    """Names in a whole file's bytes, in file order."""
    length = header_length(data[:8], len(data))
    spans, _ = parse_header(data[8 : 8 + length], len(data))
    return [span.tensor.name for span in spans]


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
