"""What relays say to one another.

Invariant (I9): a frame is a fixed header of 16 bytes and a body whose length is checked against the limit of its type
before a byte of it is read; control bodies are msgpack of the structs here, chunk bodies are raw.

    ┌────────┬────────┬──────────┬─────────────┬─────────────┬─────────────┐
    │ type 1 │ 0    1 │ 0      2 │ length    4 │ stream    4 │ number    4 │  network byte order
    └────────┴────────┴──────────┴─────────────┴─────────────┴─────────────┘

``stream`` and ``number`` belong to chunk frames: the child's number for the stream, and the chunk's index.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from echo2.broadcast.plan.model import MOST_STRETCHES, Stretch
from echo2.errors import Malformed

HEADER = struct.Struct("!BBHIII")
CONTROL, CHUNK, PADDING = 1, 2, 3
"""Types of frames. Padding warms and measures a link; it is read and thrown away."""

RELAY_PROTOCOL = 1
MAX_CONTROL_BYTES = 34 * 1024 * 1024
"""An announcement holds a whole signed manifest; see ``parse.MAX_MANIFEST_BYTES``."""
MAX_SMALL_BYTES = 1024 * 1024
"""Control frames of anybody but the seed; the largest are ``Have`` with all its numbers."""
MAX_BITMAP_BYTES = 64 * 1024
"""A manifest has no room for the hashes of more chunks than that."""
MAX_STREAMS = 64
"""That one peer may have from another."""
MAX_PADDING_BYTES = 64 * 1024
MAX_FEEDS = 64
MAX_SOURCES = 256
MAX_CHILDREN = 4096

Root = Annotated[str, msgspec.Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")]
"""An object's name: blake3 of its bytes, hexadecimal."""
Number = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class Control(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    pass


# ---- between any two ---------------------------------------------------------------------------------------------


class Greet(Control, frozen=True):
    """First on a link, from both ends; who the other is, its certificate says."""

    protocol: int
    run_id: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    """Where the sender listens; 0 for nowhere."""
    lane: Annotated[int, msgspec.Meta(ge=0, le=MAX_FEEDS * 16)] = 0
    """Which of the dialling side's connections to this peer; lane 0 to the seed carries reports and assignments."""


class Beat(Control, frozen=True):
    """I am alive. Every half second, both ways."""

    held: Annotated[dict[Number, Number], msgspec.Meta(max_length=MAX_STREAMS)] = {}
    """Per stream that I feed on this link: chunks that I have and that you have not been sent."""


class Warm(Control, frozen=True):
    """Child to parent: send padding, so that the link knows its own speed before it matters."""

    nbytes: Annotated[int, msgspec.Meta(ge=0, le=64 * 1024 * 1024)]


class Want(Control, frozen=True):
    """Child to parent: send me this object's chunks that I lack, in this order, as you get them."""

    stream: Number
    """The child's number for it, unused on this link so far."""
    root: Root
    stretches: Annotated[tuple[Stretch, ...], msgspec.Meta(max_length=MOST_STRETCHES)]
    spills: bool
    have: Annotated[bytes, msgspec.Meta(max_length=MAX_BITMAP_BYTES)]
    """Bitmap, chunk 0 in the lowest bit of the first byte; empty for nothing."""
    pace_bytes_per_s: Rate = 0.0
    """Send no faster than this over this link; 0 for as fast as it goes."""


class Have(Control, frozen=True):
    """Child to parent: these came from elsewhere; do not send them on this stream."""

    stream: Number
    numbers: Annotated[tuple[Number, ...], msgspec.Meta(max_length=65536)]


class Halt(Control, frozen=True):
    """Child to parent: send nothing more on this stream."""

    stream: Number


class Refuse(Control, frozen=True):
    """Parent to child: this stream will not be served."""

    stream: Number
    why: Annotated[str, msgspec.Meta(max_length=200)]


# ---- node to seed ------------------------------------------------------------------------------------------------


class Report(Control, frozen=True):
    """What a node measured and has; sent on a change, at most twice a second."""

    held: Annotated[tuple[Root, ...], msgspec.Meta(max_length=64)] = ()
    """Decoded roots of the snapshots that lie complete on the node's disk: bases for deltas."""
    complete: Annotated[tuple[Root, ...], msgspec.Meta(max_length=64)] = ()
    """Objects that it has whole."""
    needs: Annotated[tuple[Root, ...], msgspec.Meta(max_length=64)] = ()
    """Objects that its worker asked for and that are not whole yet."""
    progress: Annotated[dict[Root, Number], msgspec.Meta(max_length=64)] = {}
    """Chunks of objects under way."""
    edges: Annotated[dict[str, Rate], msgspec.Meta(max_length=256)] = {}
    """Bytes per second that came from each peer in the newest transfer or warm-up, as measured here."""
    sent_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    """Chunk payload sent to peers since the node started."""
    received_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    reparentings: Number = 0
    """Times the node left a parent for another since it started."""
    accused: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)] = ()
    """Peers that sent it a wrong chunk or let it starve, since it started."""
    unreachable: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)] = ()
    """Peers that it could not dial of late."""


# ---- seed to node ------------------------------------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True):
    """Where a parent is dialled."""

    node_id: str
    host: str
    port: int


class Feed(msgspec.Struct, frozen=True):
    """One stream as its child sees it."""

    sources: Annotated[tuple[Source, ...], msgspec.Meta(max_length=MAX_SOURCES)]
    """Parent, then who to turn to when it fails: its own parent, and so on; the seed is last."""
    stretches: Annotated[tuple[Stretch, ...], msgspec.Meta(max_length=MOST_STRETCHES)]
    rate_bytes_per_s: Rate
    """What the plan counts on."""
    spills: bool
    pace_bytes_per_s: Rate = 0.0
    """What the parent shall not exceed, so that no queue grows along the way; 0 for as fast as it goes."""


class Assign(Control, frozen=True):
    """A node's part in a plan. For no object: the links to keep warm for the next one."""

    generation: Number
    manifest: bytes
    """Signed manifest of the object; empty for none."""
    feeds: Annotated[tuple[Feed, ...], msgspec.Meta(max_length=MAX_FEEDS)]
    children: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_CHILDREN)]
    """Who may ask this node for chunks: its planned children and everybody further down, who may become orphans."""
    planned_children: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHILDREN)]
    """How many it serves by plan; it takes one orphan more."""


class Probe(Control, frozen=True):
    """Ask the seed for padding now. All nodes are told at once, so that the seed's uplink shows what it can carry."""


AnyControl = Greet | Beat | Warm | Want | Have | Halt | Refuse | Report | Assign | Probe

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyControl] = msgspec.msgpack.Decoder(AnyControl)


def encode_control(control: Control) -> bytes:
    """Header and body."""
    body = _ENCODER.encode(control)
    return HEADER.pack(CONTROL, 0, 0, len(body), 0, 0) + body


def decode_control(body: bytes | bytearray | memoryview) -> AnyControl:
    """Raises Malformed."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"a relay's frame could not be read: {str(error)[:200]}") from None


def chunk_header(stream: int, number: int, length: int) -> bytes:
    return HEADER.pack(CHUNK, 0, 0, length, stream, number)


def padding(nbytes: int) -> bytes:
    """A padding frame of ``nbytes`` payload."""
    return _FULL_PADDING if nbytes == MAX_PADDING_BYTES else _padding(nbytes)


def _padding(nbytes: int) -> bytes:
    return HEADER.pack(PADDING, 0, 0, nbytes, 0, 0) + bytes(nbytes)


_FULL_PADDING = _padding(MAX_PADDING_BYTES)
