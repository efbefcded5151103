"""One direction of a relay's connection in a modelled world.

Invariant: what is sent next is chosen when it can be sent, as on a socket; chunks take their share of both ends' lines,
small frames the latency alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.relay.links import ChunkOut, Out, PaddingOut
from echo2.broadcast.relay.node import Node
from echo2.simulation.flows import Flow, Flows, Pipe
from echo2.simulation.links import Access
from echo2.simulation.shelf import MemoryShelf

SMALL_BYTES = 16 * 1024
"""Frames up to this do not count on a line."""

Chosen = tuple[Out, int]


class Wire:
    def __init__(self, flows: Flows, sender: Access, receiver: Access, choose: Callable[[], Chosen | None]) -> None:
        """choose: the sender's next frame and its bytes."""
        self._flows = flows
        self._pipes = (sender.up, receiver.down)
        self._choose = choose
        self._deliver: Callable[[Out], None] = lambda out: None
        self._flow: Flow | None = None
        self._limit: Pipe | None = None
        self._under_way: Out | None = None
        self._is_open = True
        self._carried = 0
        self.latency_s = sender.latency_s + receiver.latency_s
        self.other = self
        """The other direction."""

    def connect(self, other: Wire, deliver: Callable[[Out], None]) -> None:
        self.other, self._deliver = other, deliver

    def stop(self) -> None:
        self._is_open = False
        if self._flow is not None:
            self._flows.close(self._flow)
            self._flow = None

    def pace(self, bytes_per_s: float) -> None:
        """0: as fast as it goes. Takes effect when the connection is idle next."""
        self._limit = Pipe(bytes_per_s) if bytes_per_s else None

    @property
    def is_moving(self) -> bool:
        return self._flow is not None and self._flow.rate > 0

    @property
    def carried(self) -> int:
        """Bytes that arrived."""
        return self._carried + (int(self._flow.done(asyncio.get_running_loop().time())) if self._flow else 0)

    def pump(self) -> None:
        """Send on, unless a large frame is under way."""
        if self._flow is None and self._is_open and (nbytes := self._next_large()) is not None:
            pipes = self._pipes if self._limit is None else (*self._pipes, self._limit)
            self._flow = self._flows.open(pipes, nbytes, self._arrived)

    def _next_large(self) -> int | None:
        """Send small frames until a large one comes: its bytes."""
        while (chosen := self._choose()) is not None:
            out, nbytes = chosen
            if nbytes > SMALL_BYTES:
                self._under_way = out
                return nbytes
            self._carried += nbytes
            self._arrive_later(out)
        return None

    def _arrived(self) -> float | None:
        assert self._under_way is not None, "a flow is of a frame"
        assert self._flow is not None, "it ended just now"
        self._carried += int(self._flow.goal)
        self._arrive_later(self._under_way)
        following = self._next_large()
        if following is None:
            self._flow = None
        return following

    def _arrive_later(self, out: Out) -> None:
        asyncio.get_running_loop().call_later(self.latency_s, self._take, out)

    def _take(self, out: Out) -> None:
        if self._is_open:
            self._deliver(out)


def chooser(node: Node, number: int, shelf: MemoryShelf) -> Callable[[], Chosen | None]:
    """What a node sends next over its link, and how many bytes that are."""

    def choose() -> Chosen | None:
        out = node.next_out(number, asyncio.get_running_loop().time())
        match out:
            case None:
                return None
            case bytes():
                return out, len(out)
            case PaddingOut(nbytes):
                return out, nbytes
            case ChunkOut():
                nbytes = length(shelf.manifest(out.root), out.number)
                node.sent_chunk(nbytes)
                return out, nbytes

    return choose


def length(manifest: Manifest | None, chunk: int) -> int:
    """Bytes of a chunk; 0 once the object was withdrawn."""
    return 0 if manifest is None else min(manifest.chunk_size, manifest.object_size - chunk * manifest.chunk_size)
