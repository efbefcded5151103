from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.plan.model import Stretch
from echo2.broadcast.relay.serving import Serving, order_of, pack_flags, unpack_flags
from echo2.errors import Malformed
from echo2.types import Policy

flags = st.lists(st.booleans(), min_size=1, max_size=70)


def serving(order: list[int], child: bytearray, here: bytearray) -> Serving:
    return Serving("root", Policy(0, 2), 1, order, child, here)


def drained(stream: Serving) -> list[int]:
    sent = []
    while (number := stream.next()) is not None:
        sent.append(number)
    return sent


@given(flags)
def test_a_bitmap_comes_back_as_it_was(had: list[bool]) -> None:
    here = bytearray(had)
    assert unpack_flags(pack_flags(here), len(here)) == here


@pytest.mark.parametrize("nbytes", [1, 3, 1000])
def test_a_bitmap_of_the_wrong_length_is_refused(nbytes: int) -> None:
    with pytest.raises(Malformed, match="has 2 bytes"):
        unpack_flags(bytes(nbytes), 9)


def test_no_bitmap_means_nothing_is_had() -> None:
    assert unpack_flags(b"", 9) == bytearray(9)


@given(flags, flags, st.randoms(use_true_random=False))
def test_every_chunk_that_the_child_lacks_is_sent_exactly_once_however_the_chunks_arrive(
    child: list[bool], here: list[bool], random: object
) -> None:
    count = min(len(child), len(here))
    first = bytearray(here[:count])
    stream = serving(list(range(count)), bytearray(child[:count]), first)
    later = [number for number in range(count) if not first[number]]
    random.shuffle(later)  # type: ignore[attr-defined]
    sent = drained(stream)
    for number in later:
        stream.arrived(number)
        stream.arrived(number)
        sent += drained(stream)
    assert sorted(sent) == [number for number in range(count) if not child[number]]


def test_what_is_here_goes_in_the_childs_order() -> None:
    stream = serving([3, 2, 1, 0], bytearray(4), bytearray(b"\1\0\1\1"))
    assert drained(stream) == [3, 2, 0]


def test_a_chunk_that_came_to_the_child_from_elsewhere_is_not_sent() -> None:
    stream = serving([0, 1, 2], bytearray(3), bytearray(b"\1\1\1"))
    stream.child_got((1, 99))
    assert drained(stream) == [0, 2]


def test_a_stream_that_does_not_spill_keeps_to_its_stretches() -> None:
    assert order_of((Stretch(4, 3), Stretch(2, 2, -1)), False, 10) == [4, 5, 6, 2, 1]


def test_a_stream_that_spills_goes_on_in_its_last_direction_around_the_object() -> None:
    assert order_of((Stretch(4, 3),), True, 10) == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert order_of((Stretch(9, 3, -1),), True, 10) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert order_of((), True, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    "stretch", [Stretch(8, 3), Stretch(-1, 2), Stretch(1, 3, -1), Stretch(0, 11), Stretch(0, 2, 5), Stretch(0, -1)]
)
def test_a_stretch_beyond_the_object_is_refused(stretch: Stretch) -> None:
    with pytest.raises(Malformed, match="10 chunks"):
        order_of((stretch,), True, 10)


def test_i9_stretches_that_overlap_are_refused() -> None:
    with pytest.raises(Malformed, match="must not overlap"):
        order_of([Stretch(0, 6), Stretch(3, 5)], False, 10)
    assert order_of([Stretch(4, 6), Stretch(0, 4)], False, 10) == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
