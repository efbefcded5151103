from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.plan.model import Stretch
from echo2.broadcast.relay.frames import MAX_STREAMS
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


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9), st.booleans()), max_size=4),
       st.booleans())  # fmt: skip
def test_a_chunk_that_stretches_name_twice_is_sent_where_it_was_named_first(
    count: int, raw: list[tuple[int, int, bool]], spills: bool
) -> None:
    stretches = [Stretch(first, many, 1 if up else -1) for first, many, up in raw]
    inside = all(0 <= number < count for stretch in stretches for number in stretch.numbers())
    if not inside or sum(stretch.count for stretch in stretches) > count:
        with pytest.raises(Malformed):
            order_of(stretches, spills, count)
        return
    named = [number for stretch in stretches for number in stretch.numbers()]
    if spills:
        last = stretches[-1] if stretches else Stretch(0, 0)
        named += [(last.first + last.step * (last.count + k)) % count for k in range(count)]
    assert order_of(stretches, spills, count) == list(dict.fromkeys(named))


@pytest.mark.parametrize("count", [1, 2, 65_535, 65_536, 65_537])
def test_objects_of_one_chunk_and_of_very_many_are_sent_from_first_to_last(count: int) -> None:
    stream = serving(order_of((), True, count), bytearray(count), bytearray(b"\1") * count)
    assert stream.backlog == count
    assert drained(stream) == list(range(count))
    assert stream.backlog == 0


def test_i9_a_peer_with_as_many_streams_as_it_may_have_takes_little_memory() -> None:
    count, here = 65_536, bytearray(b"\1") * 65_536
    order = order_of((), True, count)
    tracemalloc.start()
    streams = [serving(order, bytearray(count), here) for _ in range(MAX_STREAMS)]
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert streams[-1].next() == 0
    assert taken_bytes < 64 * 1024 * 1024


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
