from __future__ import annotations

import asyncio
import contextlib
import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.relay.channel import encode_message, read_order, read_word
from echo2.broadcast.relay.control import (
    MAX_MESSAGE_BYTES,
    Alive,
    AnyWord,
    Bring,
    Event,
    Hold,
    Listening,
    Publish,
    Stuck,
    Tally,
    Whole,
    Withdraw,
)
from echo2.errors import Malformed

ORDERS = (Publish(b"m" * 1000, "/a/b"), Withdraw("f" * 64), Hold(("a", "b")), Bring(b"signed"))
WORDS = (
    Listening(4711), Alive(), Whole("f" * 64, "/x"), Stuck("f" * 64, "/x", "why"), Event("kind", {"n": 1, "s": "t"}),
    Tally(1, 2, 3, {"f": 0.5}),
)  # fmt: skip


def fed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def test_orders_are_read_as_they_were_written_and_the_end_is_none() -> None:
    pipe = io.BytesIO(b"".join(encode_message(order) for order in ORDERS))
    assert [read_order(pipe) for _ in range(len(ORDERS) + 1)] == [*ORDERS, None]


async def test_words_are_read_as_they_were_written_and_the_end_is_none() -> None:
    pipe = fed(b"".join(encode_message(word) for word in WORDS))
    read: list[AnyWord | None] = [await read_word(pipe) for _ in range(len(WORDS) + 1)]
    assert read == [*WORDS, None]


@pytest.mark.parametrize("kept", [1, 3, 4, 5, 12])
async def test_an_end_within_a_message_is_the_end(kept: int) -> None:
    assert read_order(io.BytesIO(encode_message(ORDERS[0])[:kept])) is None
    assert await read_word(fed(encode_message(WORDS[2])[:kept])) is None


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, 2**32 - 1])
async def test_i9_a_length_over_the_limit_is_refused_before_anything_is_read(length: int) -> None:
    pipe = io.BytesIO(struct.pack("!I", length) + b"body")
    with pytest.raises(Malformed, match=f"at most {MAX_MESSAGE_BYTES} bytes, got {length}"):
        read_order(pipe)
    assert pipe.tell() == 4
    with pytest.raises(Malformed, match="at most"):
        await read_word(fed(struct.pack("!I", length)))


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(Malformed, match="at most"):
        encode_message(Bring(bytes(MAX_MESSAGE_BYTES)))


@given(st.binary(max_size=200))
async def test_i9_no_body_does_anything_but_be_read_or_be_malformed(body: bytes) -> None:
    data = struct.pack("!I", len(body)) + body
    for read in (lambda: read_word(fed(data)), lambda: asyncio.to_thread(read_order, io.BytesIO(data))):
        with contextlib.suppress(Malformed):
            await read()


def test_i9_an_order_is_no_word() -> None:
    with pytest.raises(Malformed, match="could not be read"):
        read_order(io.BytesIO(encode_message(Listening(1))))
