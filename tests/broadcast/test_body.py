from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshots import WriteSnapshot

from echo2.broadcast.body import Body, Piece, open_snapshot, page_aligned
from echo2.errors import IntegrityError
from echo2.transport.partial import OBJECT_NAME


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(min_size=1, max_size=300), numbers=st.lists(st.integers(0, 300), max_size=8), at=st.integers(0, 300)
)
def test_pieces_in_several_files_read_as_one(tmp_path: Path, data: bytes, numbers: list[int], at: int) -> None:
    cuts = sorted({0, len(data), *(number for number in numbers if number < len(data))})
    pieces = []
    for number, (start, end) in enumerate(pairwise(cuts)):
        file = tmp_path / str(number)
        file.write_bytes(b"head" + data[start:end] + b"tail")
        pieces += [Piece(file, 4, end - start), Piece(file, 4, 0)]
    start = at % len(data)
    into = bytearray(len(data) - start)
    with Body(pieces) as body:
        assert body.nbytes == len(data)
        body.read(start, memoryview(into))
    assert bytes(into) == data[start:]


def test_a_file_that_became_shorter_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with Body([Piece(tmp_path / "a", 1, 9)]) as body, pytest.raises(IntegrityError, match="it was cut"):
        body.read(0, memoryview(bytearray(9)))


def test_a_snapshot_without_its_whole_object_is_refused(snapshot_of: WriteSnapshot) -> None:
    manifest, folder = snapshot_of()
    weights = open_snapshot(folder)
    assert weights.body.nbytes == sum(tensor.nbytes for tensor in manifest.tensors)
    assert weights.contents.decoded_root == manifest.decoded_root
    (folder / OBJECT_NAME).write_bytes(b"x")
    with pytest.raises(IntegrityError, match="got 1"):
        open_snapshot(folder)
    (folder / OBJECT_NAME).unlink()
    with pytest.raises(IntegrityError, match="no complete snapshot"):
        open_snapshot(folder)


def test_buffers_begin_at_a_page() -> None:
    buffer = page_aligned(5000)
    assert buffer.ctypes.data % 4096 == 0
    assert (buffer == np.zeros(5000, np.uint8)).all()
