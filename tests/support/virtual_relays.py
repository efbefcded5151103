"""Relay cores joined by links of known rate and latency, in virtual time.

Bytes of a chunk take ``nbytes / rate`` on a link, then the latency; every core ticks ten times a second. Faults are
switched on by name of the node.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from blake3 import blake3

from echo2.broadcast.manifest import Manifest, TensorEntry
from echo2.broadcast.parse import roots_of
from echo2.broadcast.plan.model import SEED, Stretch
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay import links as r
from echo2.broadcast.relay.control import Event, Stuck, Whole
from echo2.broadcast.relay.node import Node
from echo2.errors import Malformed
from echo2.types import Policy, SnapshotKind

CHUNK_BYTES = 64 * 1024
TICK_S = 0.1


def object_manifest(count: int, version: int = 2, name: str = "w") -> Manifest:
    """An opaque delta of ``count`` chunks whose bytes nobody looks at."""
    size = count * CHUNK_BYTES - 7
    entry = TensorEntry(name, "U8", (size * 10,), size * 10, blake3(name.encode()).hexdigest())
    return Manifest(
        run_id="run", policy=Policy(0, version), kind=SnapshotKind.DELTA, base=Policy(0, version - 2),
        base_root="0" * 64, codec="delta", object_size=size,
        object_root=blake3(f"{name}{version}{count}".encode()).hexdigest(), chunk_size=CHUNK_BYTES,
        chunks=tuple(blake3(bytes([k % 256])).hexdigest() for k in range(count)),
        decoded_root=roots_of([entry]), tensors=(entry,), aliases={}, dtype="bfloat16",
    )  # fmt: skip


class Relays:
    def __init__(
        self, names: Sequence[str], *, rate_bytes_per_s: float = 6.25e6, latency_s: float = 0.02, lanes: int = 1
    ) -> None:
        self.now = 0.0
        self.rate, self.latency_s = rate_bytes_per_s, latency_s
        self.nodes: dict[str, Node] = {SEED: Node(SEED, None, lanes)}
        self.nodes |= {
            name: Node(name, self.source(SEED), lanes, first_stream=1000 * k) for k, name in enumerate(names, start=1)
        }
        self.whole: dict[tuple[str, str], float] = {}
        """When each (node, root) was whole."""
        self.words: list[tuple[str, object]] = []
        self.sent: dict[tuple[str, str], list[int]] = {}
        """Chunks by (parent, child), in sending order."""
        self.paces: list[tuple[str, str, float]] = []
        """(parent, child, bytes per second) of every limit that was set or lifted (0), in order."""
        self.dead: set[str] = set()
        self.frozen: set[str] = set()
        self.corrupt: set[str] = set()
        self.slow: dict[str, float] = {}
        """Factor on the rate at which a node sends."""
        self.unreachable: set[str] = set()
        self.disk: dict[tuple[str, str], bytearray] = {}
        """Chunks that a file holds when it is opened, by (node, root), one byte each."""
        self._ends: dict[tuple[str, int], tuple[str, int]] = {}
        self._carried: Counter[tuple[str, int]] = Counter()
        """Bytes that were sent to each end of a link."""
        self._arriving: dict[tuple[str, int], tuple[float, float, int]] = {}
        """Of the newest frame to each end of a link: when its first byte is there, its time, and its bytes."""
        self._busy_until: dict[tuple[str, int], float] = {}
        self._pumping: set[tuple[str, int]] = set()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self._manifests: dict[str, Manifest] = {}
        for name in self.nodes:
            self._tick(name)

    # ---- the world ---------------------------------------------------------------------------------------------

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), work))

    def run(self, seconds: float) -> None:
        end_s = self.now + seconds
        while self._heap[0][0] <= end_s:
            self._next()
        self.now = end_s

    def run_until_whole(self, root: str, names: Sequence[str], limit_s: float) -> float:
        """Seconds from now until all ``names`` have the object."""
        began_s = self.now
        while lacking := [name for name in names if (name, root) not in self.whole]:
            assert self._heap[0][0] <= began_s + limit_s, f"{lacking} are not whole after {limit_s} s"
            self._next()
        return max(self.whole[name, root] for name in names) - began_s

    def _next(self) -> None:
        self.now, _, work = heapq.heappop(self._heap)
        work()

    # ---- assignments -------------------------------------------------------------------------------------------

    def source(self, name: str) -> f.Source:
        return f.Source(name, f"{name}.test", 1)

    def publish_chain(self, manifest: Manifest, chain: Sequence[str], generation: int = 1) -> None:
        """The seed has the object; each of ``chain`` is fed by the one before, everybody further up stands in."""
        self.nodes[SEED].publish(manifest, self.now)
        whole = (Stretch(0, len(manifest.chunks)),)
        members = [SEED, *chain]
        for place, name in enumerate(members):
            sources = tuple(self.source(up) for up in reversed(members[:place]))
            feeds = (f.Feed(sources, whole, self.rate, True),) if place else ()
            below = tuple(members[place + 1 :])
            self.assign(name, f.Assign(generation, b"signed", feeds, below, min(len(below), 1)), manifest)

    def assign(self, name: str, frame: f.Assign, manifest: Manifest) -> None:
        self._manifests[manifest.object_root] = manifest
        self.nodes[name].assign(frame, manifest, self.now)
        self.act(name)

    # ---- faults ------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        self.dead.add(name)
        for (owner, number), end in list(self._ends.items()):
            if owner == name:
                del self._ends[owner, number]
                self.at(self.latency_s, lambda end=end: self._down(*end, "reset"))  # type: ignore[misc]

    def revive_seed(self) -> None:
        """A new life that remembers nothing."""
        self.dead.discard(SEED)
        self.nodes[SEED] = Node(SEED, None, 1, self.now)
        self._tick(SEED)

    def stop_chunks(self, name: str) -> None:
        """Heartbeats go on and promise much; no chunk follows."""
        for link in self.nodes[name]._links:
            for serving in link.servings.values():
                serving.next = lambda: None  # type: ignore[method-assign]

    # ---- cores -------------------------------------------------------------------------------------------------

    def act(self, name: str) -> None:
        """Do what the core wants."""
        node = self.nodes[name]
        for action in node.take():
            match action:
                case r.Dial(source, lane):
                    self.at(6 * self.latency_s, lambda s=source, n=lane: self._connect(name, s.node_id, n))  # type: ignore[misc]
                case r.Hangup(link, why):
                    self._hang_up(name, link, why)
                case r.Wake(link):
                    self._pump(name, link)
                case r.Pace(link, bytes_per_s):
                    end = self._ends.get((name, link))
                    if end is not None:
                        self.paces.append((name, end[0], bytes_per_s))
                case r.OpenFile(manifest):
                    here = self.disk.get((name, manifest.object_root), bytearray(len(manifest.chunks)))
                    node.opened(manifest.object_root, here, self.now)
                    self.act(name)
                case r.Say(word):
                    self.words.append((name, word))
                    if isinstance(word, Whole):
                        self.whole.setdefault((name, word.root), self.now)

    def events(self, kind: str) -> list[dict[str, object]]:
        return [dict(word.fields) for _, word in self.words if isinstance(word, Event) and word.kind == kind]

    def stuck(self) -> list[str]:
        return [name for name, word in self.words if isinstance(word, Stuck)]

    def _alive(self, name: str) -> bool:
        return name not in self.dead and name not in self.frozen

    def _tick(self, name: str) -> None:
        if name in self.dead:
            return
        if name not in self.frozen:
            received = {number: self._arrived(name, number) for owner, number in self._ends if owner == name}
            for number in received:
                if self._arrives(name, number):
                    self.nodes[name].heard(number, self.now)
            self.nodes[name].tick(received, self.now)
            self.act(name)
        self.at(TICK_S, lambda: self._tick(name))

    def _arrives(self, name: str, number: int) -> bool:
        return 0 < self._arrived(name, number) < self._carried[name, number]

    def _arrived(self, name: str, number: int) -> int:
        """Bytes so far, those of the frame that comes just now included."""
        first_s, took_s, nbytes = self._arriving.get((name, number), (0.0, 1.0, 0))
        share = min(max((self.now - first_s) / took_s, 0.0), 1.0)
        return self._carried[name, number] - nbytes + int(share * nbytes)

    # ---- links -------------------------------------------------------------------------------------------------

    def _connect(self, name: str, peer: str, lane: int) -> None:
        if name in self.dead:
            return
        if name in self.frozen:  # it hears what came of its dialling when it goes on
            self.at(TICK_S, lambda: self._connect(name, peer, lane))
        elif peer in self.dead or peer in self.unreachable:
            self._dial_failed(name, peer, lane, "refused")
        elif peer in self.frozen:
            self.at(5.0, lambda: self._dial_failed(name, peer, lane, "timed out"))
        else:
            ours, theirs = next(self._numbers), next(self._numbers)
            self._ends[name, ours], self._ends[peer, theirs] = (peer, theirs), (name, ours)
            self.nodes[peer].link_up(theirs, name, False, lane, self.now)
            self.nodes[name].link_up(ours, peer, True, lane, self.now)
            self.act(peer)
            self.act(name)

    def _dial_failed(self, name: str, peer: str, lane: int, why: str) -> None:
        if name in self.dead:
            return
        if name in self.frozen:
            self.at(TICK_S, lambda: self._dial_failed(name, peer, lane, why))
            return
        self.nodes[name].dial_failed(peer, lane, why, self.now)
        self.act(name)

    def _hang_up(self, name: str, number: int, why: str) -> None:
        end = self._ends.get((name, number))
        self._down(name, number, why)
        if end is not None:
            self.at(self.latency_s, lambda: self._down(*end, "the other side closed the connection"))

    def _down(self, name: str, number: int, why: str) -> None:
        self._ends.pop((name, number), None)
        if self._alive(name):
            self.nodes[name].link_down(number, why, self.now)
            self.act(name)

    def _pump(self, name: str, number: int) -> None:
        """Let the link carry its next frame as soon as it is free."""
        if (name, number) not in self._pumping:
            self._pumping.add((name, number))
            busy_s = self._busy_until.get((name, number), 0.0) - self.now
            self.at(max(busy_s, 0.0), lambda: self._carry(name, number))

    def _carry(self, name: str, number: int) -> None:
        self._pumping.discard((name, number))
        end = self._ends.get((name, number))
        out = self.nodes[name].next_out(number, self.now) if end is not None and self._alive(name) else None
        if end is None or out is None:
            return
        nbytes = self._size(out)
        if isinstance(out, r.ChunkOut):
            self.nodes[name].sent_chunk(nbytes)
            self.sent.setdefault((name, end[0]), []).append(out.number)
        took_s = nbytes / (self.rate * self.slow.get(name, 1.0))
        self._busy_until[name, number] = self.now + took_s
        self._carried[end] += nbytes
        self._arriving[end] = (self.now + self.latency_s, took_s, nbytes)
        self.at(took_s + self.latency_s, lambda: self._deliver(name, *end, out, nbytes))
        self._pump(name, number)

    def _size(self, out: r.Out) -> int:
        if isinstance(out, r.ChunkOut):
            manifest = self._manifests[out.root]
            return min(manifest.chunk_size, manifest.object_size - out.number * manifest.chunk_size)
        return len(out) if isinstance(out, bytes) else out.nbytes

    def _deliver(self, sender: str, name: str, number: int, out: r.Out, nbytes: int) -> None:
        if not self._alive(name) or (name, number) not in self._ends:
            return
        node = self.nodes[name]
        node.heard(number, self.now)
        if isinstance(out, r.ChunkOut):
            root = node.accepts(number, out.stream, out.number, nbytes)
            if root is not None and sender in self.corrupt:
                node.wrong(number, root, out.number, self.now)
            elif root is not None:
                node.stored(root, out.stream, out.number, self.now)
        elif isinstance(out, bytes):
            frame = f.decode_control(out[f.HEADER.size :])
            if not isinstance(frame, f.Report):
                try:
                    node.control(number, frame, self.now)
                except Malformed as error:
                    self._hang_up(name, number, str(error))
        self.act(name)
