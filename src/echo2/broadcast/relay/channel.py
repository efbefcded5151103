"""Messages between a program and its relay, as bytes in a pipe.

Invariant (I9): a length is checked against ``MAX_MESSAGE_BYTES`` before a byte of the message is read. A pipe that
ends, within a message too, is the end of the other process and not an error: None.

    ┌──────────┬─────────────────────┐
    │ length 4 │ msgpack of a struct │  network byte order; see ``control``
    └──────────┴─────────────────────┘
"""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO, TypeVar

import msgspec

from echo2.broadcast.relay.control import MAX_MESSAGE_BYTES, AnyOrder, AnyWord, Order, Word
from echo2.errors import Malformed

T = TypeVar("T")

_LENGTH = struct.Struct("!I")
_ENCODER = msgspec.msgpack.Encoder()
_ORDERS: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)
_WORDS: msgspec.msgpack.Decoder[AnyWord] = msgspec.msgpack.Decoder(AnyWord)


def encode_message(message: Order | Word) -> bytes:
    """Length and body. Raises Malformed for a message over the limit."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(_checked(len(body))) + body


def read_order(pipe: BinaryIO) -> AnyOrder | None:
    """Relay: the next order; None at the end. Blocks. Raises Malformed."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    length = _checked(*_LENGTH.unpack(head))
    body = pipe.read(length)
    return _decode(_ORDERS, body) if len(body) == length else None


async def read_word(pipe: asyncio.StreamReader) -> AnyWord | None:
    """Program: the next word; None at the end. Raises Malformed."""
    try:
        length = _checked(*_LENGTH.unpack(await pipe.readexactly(_LENGTH.size)))
        return _decode(_WORDS, await pipe.readexactly(length))
    except asyncio.IncompleteReadError:
        return None


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"a message between program and relay could not be read: {str(error)[:200]}") from None


def _checked(length: int) -> int:
    if length > MAX_MESSAGE_BYTES:
        raise Malformed(f"a message between program and relay has at most {MAX_MESSAGE_BYTES} bytes, got {length}")
    return length
