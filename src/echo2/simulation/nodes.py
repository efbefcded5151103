"""Relays by their own state machines: the production ``Node``, ``Seed`` and director over modelled links.

Invariant: what relays decide is decided by production code; here are only its shell's parts, without sockets, threads
and files: what a link carries is a fluid flow, what is said of small things takes the latency alone.

Ten ticks a second for every node: for worlds of a few dozen workers. ``planned`` is the same for thousands.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.plan.model import SEED, Topology
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay import links as ln
from echo2.broadcast.relay.control import Tally, Whole
from echo2.broadcast.relay.node import Node
from echo2.broadcast.relay.seed import Seed
from echo2.broadcast.signing import open_signed
from echo2.metrics import Traffic
from echo2.simulation.flows import Flows
from echo2.simulation.links import Access, VirtualLine
from echo2.simulation.relaying import Relayed
from echo2.simulation.shelf import MemoryShelf
from echo2.simulation.wires import Wire, chooser, length
from echo2.transport.messages import RelayCertificate

TICK_S = 0.1
DIAL_TRIPS = 6
"""One-way trips of TCP, TLS and greeting."""
UNANSWERED_S = 5.0
"""Until dialling nobody fails."""
FIRST_STREAMS = 1_000_003
"""Between those of two lives."""


class NodeRelays:
    """``ports.Seed``, and every worker's relay."""

    def __init__(
        self, topology: Topology, gamma: float, home: Access, shelf: MemoryShelf, flows: Flows, public_key: bytes
    ) -> None:
        self._shelf = shelf
        self._flows = flows
        self._public_key = public_key
        self._home = home
        self._seed = Seed(topology, gamma, "")
        self._nodes: dict[str, Node] = {}
        self._accesses: dict[str, Access] = {SEED: home}
        self._reachable: dict[str, bool] = {SEED: True}
        self._relays: dict[str, Relayed] = {}
        self._here: defaultdict[str, dict[str, bytearray]] = defaultdict(dict)
        """What lies on each node's disk: one byte per chunk."""
        self._wires: defaultdict[str, dict[int, Wire]] = defaultdict(dict)
        """By node and its number of the link."""
        self._numbers = 0
        self._lives = 0
        self._tally = Tally(0, 0, 0, {})

    # ---- ports.Seed --------------------------------------------------------------------------------------------

    async def publish(self, root: str) -> None:
        manifest, signed = self._shelf.manifest(root), self._shelf.signed(root)
        if manifest is not None and signed is not None:
            self._begin()
            self._nodes[SEED].publish(manifest, _now())
            self._seed.publish(manifest, signed, _now())
            self._act(SEED)

    async def withdraw(self, root: str) -> None:
        if SEED in self._nodes:
            self._nodes[SEED].withdraw(root)
            self._seed.withdraw(root)
            self._act(SEED)

    async def certify(self, peer_id: str, public_key_pem: bytes) -> RelayCertificate:
        return RelayCertificate(b"", b"", "", 0)

    def traffic(self) -> Traffic:
        tally = self._tally
        return Traffic(
            predicted_s=tally.predicted_s or None,
            bound_s=tally.bound_s or None,
            seed_sent_bytes=tally.sent_bytes,
            sent_bytes_by_node={node.node_id: node.sent_bytes for node in tally.nodes},
            reparentings=sum(node.reparentings for node in tally.nodes),
        )

    # ---- relays ------------------------------------------------------------------------------------------------

    def join(self, line: VirtualLine, relay: Relayed) -> None:
        self._begin()
        name = line.principal.peer_id
        self._accesses[name], self._reachable[name] = line.access, line.link.reachable
        self._relays[name] = relay
        self._make(name, f.Source(SEED, SEED, 1))

    async def expel(self, peer_id: str) -> None:
        self.leave(peer_id)

    def leave(self, name: str) -> None:
        """Nothing it sends arrives any more; others find out by its silence."""
        self._nodes.pop(name, None)
        self._relays.pop(name, None)
        for wire in self._wires.pop(name, {}).values():
            wire.stop()

    def ask(self, name: str, manifest: Manifest) -> None:
        if name in self._nodes:
            self._nodes[name].bring(manifest, _now())
            self._act(name)

    def share(self, name: str, root: str) -> float:
        here = self._here[name].get(root)
        return sum(here) / len(here) if here else 0.0

    def drop(self, name: str, root: str) -> None:
        if name in self._nodes:
            self._nodes[name].withdraw(root)
            self._act(name)

    # ---- time --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if SEED not in self._nodes:
            self._make(SEED, None)
            self._tick()

    def _make(self, name: str, seed: f.Source | None) -> None:
        self._lives += 1
        self._nodes[name] = Node(name, seed, 1, _now(), self._lives * FIRST_STREAMS % 2**31)

    def _tick(self) -> None:
        now = _now()
        for name in list(self._nodes):
            node, wires = self._nodes[name], self._wires[name]
            if name in self._relays:
                node.hold(tuple(self._relays[name].held()))
            for number, wire in list(wires.items()):
                if wire.other.is_moving:
                    node.heard(number, now)
            node.tick({number: wire.other.carried for number, wire in wires.items()}, now)
            if name == SEED:
                acked = {number: wire.carried for number, wire in wires.items()}
                self._tally = self._seed.tick(acked, node, now) or self._tally
                for source, number in self._seed.probes_due(now):
                    self._probe(source, number)
            self._act(name)
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    # ---- what the cores want -----------------------------------------------------------------------------------

    def _act(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is None:
            return
        if name == SEED:
            self._seed.send(node, _now())
        for action in node.take():
            self._do(name, node, action)

    def _do(self, name: str, node: Node, action: ln.Action) -> None:
        match action:
            case ln.Dial(source, lane):
                trips = DIAL_TRIPS * self._latency_s(name, source.node_id)
                _later(trips, lambda: self._connect(name, node, source.node_id, lane))
            case ln.Hangup(number, why):
                self._hang_up(name, number, why)
            case ln.Wake(number):
                if (wire := self._wires[name].get(number)) is not None:
                    wire.pump()
            case ln.Pace(number, bytes_per_s):
                if (wire := self._wires[name].get(number)) is not None:
                    wire.pace(bytes_per_s)
            case ln.OpenFile(manifest):
                root = manifest.object_root
                here = self._here[name].setdefault(root, bytearray(len(manifest.chunks)))
                node.opened(root, bytearray(here), _now())
                self._act(name)
            case ln.CloseFile(root):
                self._here[name].pop(root, None)
            case ln.Say(word):
                if isinstance(word, Whole) and name in self._relays:
                    self._relays[name].whole(word.root)

    # ---- links -------------------------------------------------------------------------------------------------

    def _latency_s(self, one: str, other: str) -> float:
        access = self._accesses.get(other)
        return self._accesses[one].latency_s + (access.latency_s if access is not None else 0.0)

    def _connect(self, name: str, node: Node, peer: str, lane: int) -> None:
        if self._nodes.get(name) is not node:
            return
        if peer not in self._nodes or not self._reachable[peer]:
            _later(UNANSWERED_S, lambda: self._dial_failed(name, node, peer, lane))
            return
        ours, theirs = self._numbers + 1, self._numbers + 2
        self._numbers += 2
        there = Wire(
            self._flows, self._accesses[peer], self._accesses[name], chooser(self._nodes[peer], theirs, self._shelf)
        )
        back = Wire(self._flows, self._accesses[name], self._accesses[peer], chooser(node, ours, self._shelf))
        there.connect(back, lambda out: self._deliver(name, ours, out))
        back.connect(there, lambda out: self._deliver(peer, theirs, out))
        self._wires[peer][theirs], self._wires[name][ours] = there, back
        self._nodes[peer].link_up(theirs, name, False, lane, _now())
        node.link_up(ours, peer, True, lane, _now())
        if peer == SEED and lane == 0:
            self._probe(self._seed.link_up(theirs, name, name, 1, _now()), theirs)
        self._act(peer)
        self._act(name)

    def _probe(self, source: f.Source, number: int) -> None:
        def answer() -> None:
            reachable = self._reachable[source.node_id] and source.node_id in self._nodes
            self._seed.probed(source, number, reachable, _now())
            self._act(SEED)

        _later(DIAL_TRIPS * self._latency_s(SEED, source.node_id), answer)

    def _dial_failed(self, name: str, node: Node, peer: str, lane: int) -> None:
        if self._nodes.get(name) is node:
            node.dial_failed(peer, lane, "timed out", _now())
            self._act(name)

    def _hang_up(self, name: str, number: int, why: str) -> None:
        wire = self._wires[name].get(number)
        if wire is None:
            return
        self._down(name, number, why)
        for peer, wires in list(self._wires.items()):
            for theirs, other in list(wires.items()):
                if other is wire.other:
                    _later(wire.latency_s, lambda p=peer, n=theirs: self._down(p, n, "it hung up"))  # type: ignore[misc]

    def _down(self, name: str, number: int, why: str) -> None:
        wire = self._wires[name].pop(number, None)
        if wire is None:
            return
        wire.stop()
        if name in self._nodes:
            self._nodes[name].link_down(number, why, _now())
            if name == SEED:
                self._seed.link_down(number, _now())
            self._act(name)

    def _deliver(self, name: str, number: int, out: ln.Out) -> None:
        node = self._nodes.get(name)
        if node is None or number not in self._wires[name]:
            return
        node.heard(number, _now())
        match out:
            case ln.ChunkOut(root, stream, chunk):
                nbytes = length(self._shelf.manifest(root), chunk)
                accepted = node.accepts(number, stream, chunk, nbytes)
                if accepted is not None and root in self._here[name]:
                    self._here[name][root][chunk] = 1
                    node.stored(root, stream, chunk, _now())
            case bytes():
                self._hear(name, node, number, f.decode_control(out[f.HEADER.size :]))
        self._act(name)

    def _hear(self, name: str, node: Node, number: int, frame: f.AnyControl) -> None:
        match frame:
            case f.Assign():
                manifest = _opened(frame.manifest, self._public_key) if frame.manifest else None
                node.assign(frame, manifest, _now())
            case f.Report() if name == SEED:
                self._seed.report(number, frame, _now())
            case _:
                node.control(number, frame, _now())


@lru_cache(maxsize=64)
def _opened(signed: bytes, public_key: bytes) -> Manifest:
    return open_signed(signed, public_key)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _later(delay_s: float, work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, work)
