"""One object on its way along a plan: streams as fluid flows of a few pieces.

Invariant: a node never has more of a piece than its parent had one hop's delay before, so a chain's time is that of its
slowest part plus a hop's delay for every relay, as with the production chunks, however coarse the pieces are. A child
gets a piece once. What a stream carries, in which order, and whether it spills is the production plan's.

    parent begins a piece ──hop──▶ the child may begin it ──flow──▶ the child has it, once the parent has for a hop
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import lru_cache

from echo2.broadcast.plan.model import SEED, Plan, Stream, Stretch
from echo2.broadcast.relay.serving import order_of
from echo2.simulation.flows import Flow, Flows, Pipe
from echo2.simulation.links import Access

SAME_MOMENT_S = 1e-6


class Reception:
    """What a node has of the object."""

    def __init__(self, pieces: int, whole: bool = False) -> None:
        self.begun_s: list[float | None] = [-1e18 if whole else None] * pieces
        self.had_s: list[float | None] = list(self.begun_s)
        self.had = pieces if whole else 0
        self.rate = 0.0
        """At which the newest piece came; 0 for who had everything from the start."""
        self.feeds: list[Feed] = []
        """That bring it here."""
        self.children: list[Feed] = []

    def is_coming(self, piece: int) -> bool:
        return any(feed.piece == piece for feed in self.feeds)


class Feed:
    """One stream: at most one piece is under way."""

    def __init__(self, way: Way, stream: Stream, order: list[int]) -> None:
        self.stream = stream
        self._way = way
        self._order = order
        self._parent, self._child = way.nodes[stream.parent], way.nodes[stream.child]
        self._latency_s = way.latency_s(stream.parent, stream.child)
        self._asked_s = asyncio.get_running_loop().time()
        self._flow: Flow | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.piece: int | None = None
        self._parent.children.append(self)
        self._child.feeds.append(self)

    def close(self) -> None:
        if self._flow is not None:
            self._way.flows.close(self._flow)
        if self._timer is not None:
            self._timer.cancel()
        if self.piece is not None:
            self._child.begun_s[self.piece] = None
        self._flow = self._timer = self.piece = None
        self._parent.children.remove(self)
        self._child.feeds.remove(self)

    def pump(self) -> None:
        """Begin the next piece, if none is under way and one can be had."""
        if self.piece is None:
            nbytes = self._begin()
            if nbytes is not None and self._flow is None:
                self._flow = self._way.flows.open(self._way.pipes(self.stream), nbytes, self._arrived)

    def parent_has(self, piece: int) -> None:
        """The parent got the piece whole."""
        if self.piece == piece and self._flow is None:
            self._wait(self._hop_s, self._finish)
        elif self.piece is None:
            self.pump()

    @property
    def _hop_s(self) -> float:
        chunk_s = self._way.chunk_bytes / self._parent.rate if self._parent.rate else 0.0
        return chunk_s + self._latency_s

    def _begin(self) -> float | None:
        """Bytes of the piece that begins now; None when none can be had yet, and then a timer when that will change."""
        now_s, child, parent, hop_s = asyncio.get_running_loop().time(), self._child, self._parent, self._hop_s
        soonest_s = float("inf")
        for place, piece in enumerate(self._order):
            if child.had_s[piece] is not None or child.is_coming(piece):
                continue
            begun_s = parent.begun_s[piece]
            if begun_s is None:
                continue
            ready_s = max(begun_s + hop_s, self._asked_s + self._latency_s)
            if ready_s <= now_s + SAME_MOMENT_S:
                del self._order[place]
                self.piece, child.begun_s[piece] = piece, now_s
                for feed in child.children:
                    feed.parent_begins()
                return self._way.piece_bytes
            soonest_s = min(soonest_s, ready_s)
        if soonest_s < float("inf"):
            self._wait(soonest_s - now_s, self.pump)
        return None

    def parent_begins(self) -> None:
        """Look again, a hop later."""
        if self.piece is None and self._timer is None:
            self._wait(self._hop_s, self.pump)

    def _wait(self, delay_s: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()

        def ring() -> None:
            self._timer = None
            then()

        self._timer = asyncio.get_running_loop().call_later(max(delay_s, 0.0), ring)

    def _arrived(self) -> float | None:
        """The flow of the piece ended; bytes of the next one, when it follows at once."""
        assert self.piece is not None, "a flow is of a piece"
        assert self._flow is not None, "it ended just now"
        now_s = asyncio.get_running_loop().time()
        had_s = self._parent.had_s[self.piece]
        self._child.rate = self._flow.rate
        if had_s is None or had_s + self._hop_s > now_s + SAME_MOMENT_S:
            self._flow = None
            if had_s is not None:
                self._wait(had_s + self._hop_s - now_s, self._finish)
            return None
        self._take(now_s)
        following = self._begin()
        if following is None:
            self._flow = None
        return following

    def _finish(self) -> None:
        """The rest of the piece, which the parent itself has only now, is here as well."""
        self._take(asyncio.get_running_loop().time())
        self.pump()

    def _take(self, now_s: float) -> None:
        piece, self.piece = self.piece, None
        assert piece is not None, "one was under way"
        self._child.had_s[piece] = now_s
        self._child.had += 1
        for feed in self._child.children:
            feed.parent_has(piece)
        self._way.took(self.stream)


class Way:
    """One object, from the seed to all nodes of a plan that changes as nodes come and go."""

    def __init__(
        self,
        flows: Flows,
        accesses: Mapping[str, Access],
        size_bytes: int,
        chunk_bytes: int,
        pieces: int,
        on_whole: Callable[[str], None],
    ) -> None:
        """accesses: of the seed and of every node.  chunk_bytes: of production, whose delay per hop is kept."""
        self.flows = flows
        self.chunk_bytes = min(chunk_bytes, size_bytes)
        self.chunks = -(-size_bytes // chunk_bytes)
        self.pieces = min(pieces, self.chunks)
        self.piece_bytes = size_bytes / self.pieces
        self._accesses = accesses
        self._on_whole = on_whole
        self.nodes: dict[str, Reception] = {SEED: Reception(self.pieces, whole=True)}
        self._parted: dict[str, Reception] = {}
        """Nodes that left, with what lies on their disks."""
        self._feeds: dict[Stream, Feed] = {}
        self.sent_bytes: dict[str, float] = {}

    def latency_s(self, parent: str, child: str) -> float:
        return self._accesses[parent].latency_s + self._accesses[child].latency_s

    def pipes(self, stream: Stream) -> tuple[Pipe, ...]:
        return self._accesses[stream.parent].up, self._accesses[stream.child].down

    def follow(self, plan: Plan) -> None:
        """Streams that stay go on undisturbed; a node that is whole is fed no more."""
        wanted = dict.fromkeys(plan.streams)
        for stream in [stream for stream in self._feeds if stream not in wanted]:
            self._feeds.pop(stream).close()
        for stream in wanted:
            if stream.child not in self.nodes:
                self.nodes[stream.child] = self._take_back(stream.child)
        for stream in wanted:
            if stream not in self._feeds and self.nodes[stream.child].had < self.pieces:
                self._feeds[stream] = Feed(self, stream, self._order(stream))
        for stream in wanted:
            if stream in self._feeds:
                self._feeds[stream].pump()

    def add(self, stream: Stream) -> None:
        """One more node, fed by one that is there."""
        node = self.nodes[stream.child] = self._take_back(stream.child)
        if node.had < self.pieces and stream.parent in self.nodes:
            feed = self._feeds[stream] = Feed(self, stream, self._order(stream))
            feed.pump()

    def _take_back(self, name: str) -> Reception:
        return self._parted.pop(name) if name in self._parted else Reception(self.pieces)

    def leave(self, name: str) -> None:
        """The node is gone and feeds nobody; who depended on it waits for ``follow``."""
        for stream in [stream for stream in self._feeds if name in (stream.parent, stream.child)]:
            self._feeds.pop(stream).close()
        if name in self.nodes:
            self._parted[name] = self.nodes.pop(name)

    def comes_back_whole(self, name: str) -> bool:
        """A node that left with everything is here again."""
        node = self._parted.get(name)
        if node is None or node.had < self.pieces:
            return False
        self.nodes[name] = self._parted.pop(name)
        return True

    def stop(self) -> None:
        for feed in self._feeds.values():
            feed.close()
        self._feeds = {}

    def share(self, node_id: str) -> float:
        node = self.nodes.get(node_id)
        return 0.0 if node is None else node.had / self.pieces

    def took(self, stream: Stream) -> None:
        """A piece came over the stream."""
        self.sent_bytes[stream.parent] = self.sent_bytes.get(stream.parent, 0.0) + self.piece_bytes
        node = self.nodes[stream.child]
        if node.had == self.pieces:
            for feed in list(node.feeds):
                if self._feeds.pop(feed.stream, None) is not None:
                    feed.close()
            self._on_whole(stream.child)

    def _order(self, stream: Stream) -> list[int]:
        return list(_pieces_of(stream.stretches, stream.spills, self.chunks, self.pieces))


@lru_cache(maxsize=1024)
def _pieces_of(stretches: tuple[Stretch, ...], spills: bool, chunks: int, pieces: int) -> tuple[int, ...]:
    """Pieces in the order in which the production relay sends their chunks."""
    return tuple(dict.fromkeys(chunk * pieces // chunks for chunk in order_of(stretches, spills, chunks)))
