from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo2.broadcast import changes as module
from echo2.broadcast.changes import BLOCK_BYTES, Changes, decode_changes, encode_changes
from echo2.errors import IntegrityError

WIDTHS = (1, 2, 4, 8)
Words = NDArray[Any]


def restored(base: Words, changes: Changes) -> Words:
    positions, values = decode_changes(changes, len(base), base.itemsize)
    new = base.copy()
    new[positions] += values
    return new


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Words, Words]:
    """A base and a new array that differ in some elements, by a little or in every bit."""
    width = draw(st.sampled_from(WIDTHS))
    length = draw(st.integers(0, 1500))
    base = np.frombuffer(draw(st.binary(min_size=length * width, max_size=length * width)), f"<u{width}")
    new = base.copy()
    places = draw(st.lists(st.integers(0, max(length - 1, 0)), max_size=40)) if length else []
    for place in places:
        step = draw(st.one_of(st.integers(-200, 200), st.integers(0, 2 ** (8 * width) - 1)))
        new[place] = (int(new[place]) + step) % 2 ** (8 * width)
    return base, new


@settings(deadline=None, max_examples=200)
@given(pair=pairs())
def test_any_words_come_back_bit_for_bit(pair: tuple[Words, Words]) -> None:
    base, new = pair
    changes = encode_changes(base, new)
    assert restored(base, changes).tobytes() == new.tobytes()
    assert len(changes.small) == np.count_nonzero(base != new)


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_changed_by_anything_comes_back(width: int) -> None:
    random = np.random.default_rng(width)
    base, new = (random.integers(0, 256, 64_000, np.uint8).view(f"<u{width}") for _ in range(2))
    assert (restored(base, encode_changes(base, new)) == new).all()


@pytest.mark.parametrize(("width", "kind"), [(2, "f2"), (4, "f4"), (8, "f8")])
def test_special_floats_become_one_another_exactly(width: int, kind: str) -> None:
    floats = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, np.finfo(kind).tiny], kind).view(f"<u{width}")
    payload = floats[4:5] | 3
    specials = np.concatenate([floats, payload])
    base, new = (part.reshape(-1) for part in np.meshgrid(specials, specials))
    assert restored(base, encode_changes(base, new)).tobytes() == new.tobytes()


def test_a_sign_flip_is_the_largest_difference_and_fits() -> None:
    base, new = np.array([0, 0x8000, 1], "<u2"), np.array([0x8000, 0, 0x8001], "<u2")
    assert (restored(base, encode_changes(base, new)) == new).all()


def test_the_streams_are_as_documented() -> None:
    base = np.zeros(2000, "<u2")
    new = base.copy()
    new[[3, 4, 4 + 255, 4 + 255 + 256, 1999]] = [1, 0xFFFF, 127, 128, 300]
    assert encode_changes(base, new) == Changes(
        gaps=bytes([3, 0, 254, 255, 0, *[255] * 5, 1999 - 515 - 1 - 5 * 255]),
        small=bytes([2, 1, 254, 255, 255]),
        large=bytes([0, 88, 1, 2]),  # 256 and 600: low bytes, then high bytes
    )


def test_equal_arrays_have_no_changes() -> None:
    assert encode_changes(np.ones(9, "<u4"), np.ones(9, "<u4")) == Changes(b"", b"", b"")


@pytest.mark.parametrize("width", WIDTHS)
def test_changes_at_the_borders_of_blocks_and_words_are_found(width: int) -> None:
    step = BLOCK_BYTES // width
    base = np.zeros(2 * step + 3, f"<u{width}")
    new = base.copy()
    new[[0, step - 1, step, 2 * step - 1, 2 * step, 2 * step + 2]] = 1
    assert (restored(base, encode_changes(base, new)) == new).all()


def test_one_change_in_a_hundred_costs_eleven_bits_each() -> None:
    random = np.random.default_rng(0)
    base = (random.standard_normal(400_000, np.float32) * 0.02).view(np.uint32) >> 16
    base = base.astype("<u2")
    new = base + (random.random(len(base)) < 0.01) * random.choice(np.array([1, 65535], "<u2"), len(base))
    changes = encode_changes(base, new)
    assert len(changes.gaps) < 1.15 * len(changes.small)
    assert not changes.large


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (Changes(bytes([9]), b"\x02", b""), "must lie within 9 elements, they reach 10"),
        (Changes(b"\xff" * 9, b"", b""), "must lie within"),
        (Changes(bytes([254] * 1000), bytes(1000), b""), "must lie within"),
        (Changes(bytes(3), b"\x02", b""), "3 changed elements must have as many differences, got 1"),
        (Changes(b"", b"\x02", b""), "as many differences"),
        (Changes(b"\x00", b"\xff", b""), "1 large differences take 2 bytes each, got 0"),
        (Changes(b"\x00", b"\x01", b"\x00\x00"), "0 large differences"),
        (Changes(b"\x00", b"\xff", b"\x00" * 3), "take 2 bytes each, got 3"),
    ],
)
def test_streams_that_do_not_add_up_are_refused(changes: Changes, fault: str) -> None:
    with pytest.raises(IntegrityError, match=fault):
        decode_changes(changes, 9, 2)


@settings(deadline=None)
@given(gaps=st.binary(max_size=60), small=st.binary(max_size=60), large=st.binary(max_size=8))
def test_streams_of_any_bytes_stay_within_the_array_or_are_refused(gaps: bytes, small: bytes, large: bytes) -> None:
    try:
        positions, values = decode_changes(Changes(gaps, small, large), 3000, 2)
    except IntegrityError:
        return
    assert len(positions) == len(values)
    assert (np.diff(positions, prepend=-1, append=3000) > 0).all()


def test_the_block_is_a_whole_number_of_words() -> None:
    assert module.BLOCK_BYTES % 8 == 0
