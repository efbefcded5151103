"""Relays by the production plan alone: who feeds whom is planned and repaired as in production, streams are fluid.

Invariant: a delta sets out at once to all that hold its base, an anchor to those that ask; who comes later is fed by
whoever the production rules choose. Rates are known exactly, as after many measurements. What is left out is how
relays find out: they measure, greet, warm links and hold back senders in ``nodes``, which this is tested equal to.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from itertools import islice

import msgspec

from echo2.broadcast.director.director import GATHER_S, LATENCY_S
from echo2.broadcast.director.late import Candidate, best_parent
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.plan.draft import in_order, whole
from echo2.broadcast.plan.make import make_plan
from echo2.broadcast.plan.model import SEED, Node, Plan, Stream, Topology
from echo2.broadcast.plan.repair import joined, order_at, without
from echo2.metrics import Traffic
from echo2.simulation.flows import Flows
from echo2.simulation.links import Access, VirtualLine
from echo2.simulation.relaying import Relayed
from echo2.simulation.shelf import MemoryShelf
from echo2.simulation.streams import Way
from echo2.transport.messages import RelayCertificate

ENOUGH_IDLE = 32
"""Idle nodes with the whole object, among which somebody who comes late is given a parent."""
REPARENT_S = 1.0
"""After a relay died, until its children are fed by others."""


class Sending(msgspec.Struct):
    """An object that is on the shelf."""

    manifest: Manifest
    way: Way
    plan: Plan | None = None
    waiting: dict[str, None] = {}
    """Nodes without a part."""
    idle: dict[str, None] = {}
    """Nodes that have everything and have fed nobody yet."""


class PlannedRelays:
    """``ports.Seed``, and every worker's relay."""

    def __init__(
        self, topology: Topology, gamma: float, home: Access, shelf: MemoryShelf, flows: Flows, pieces: int
    ) -> None:
        self._topology = topology
        self._gamma = gamma
        self._shelf = shelf
        self._flows = flows
        self._pieces = pieces
        self._accesses: dict[str, Access] = {SEED: home}
        self._reachable: dict[str, bool] = {}
        self._relays: dict[str, Relayed] = {}
        self._sendings: dict[str, Sending] = {}
        self._last: tuple[object, Plan] | None = None
        self._sent: Counter[str] = Counter()
        self._reparentings = 0
        self._predicted_s = self._bound_s = 0.0

    # ---- ports.Seed --------------------------------------------------------------------------------------------

    async def publish(self, root: str) -> None:
        if root in self._sendings or (manifest := self._shelf.manifest(root)) is None:
            return
        size = manifest.object_size
        way = Way(
            self._flows, self._accesses, size, manifest.chunk_size, self._pieces, lambda name: self._whole(root, name)
        )
        sending = self._sendings[root] = Sending(manifest, way)
        holders = [name for name, relay in self._relays.items() if manifest.base_root in relay.held()]
        if manifest.base_root and holders:
            self._begin(sending, holders)

    async def withdraw(self, root: str) -> None:
        sending = self._sendings.pop(root, None)
        if sending is not None:
            sending.way.stop()
            self._sent.update(sending.way.sent_bytes)

    async def certify(self, peer_id: str, public_key_pem: bytes) -> RelayCertificate:
        return RelayCertificate(b"", b"", "", 0)

    def traffic(self) -> Traffic:
        sent = Counter(self._sent)
        for sending in self._sendings.values():
            sent.update(sending.way.sent_bytes)
        seed_sent = sent.pop(SEED, 0.0)
        return Traffic(
            predicted_s=self._predicted_s or None,
            bound_s=self._bound_s or None,
            seed_sent_bytes=int(seed_sent),
            sent_bytes_by_node={name: int(nbytes) for name, nbytes in sorted(sent.items())},
            reparentings=self._reparentings,
        )

    # ---- relays ------------------------------------------------------------------------------------------------

    def join(self, line: VirtualLine, relay: Relayed) -> None:
        """A worker's relay is there, until its line goes down for good (``leave``)."""
        name = line.principal.peer_id
        self._accesses[name] = line.access
        self._reachable[name] = line.link.reachable
        self._relays[name] = relay

    async def expel(self, peer_id: str) -> None:
        self.leave(peer_id)

    def leave(self, name: str) -> None:
        """Its children are fed by others, after a while."""
        self._relays.pop(name, None)
        for sending in self._sendings.values():
            sending.waiting.pop(name, None)
            sending.idle.pop(name, None)
            if sending.plan is not None and any(stream.child == name for stream in sending.plan.streams):
                self._reparentings += sum(stream.parent == name for stream in sending.plan.streams)
                sending.plan = without(sending.plan, name)
                sending.way.leave(name)
                asyncio.get_running_loop().call_later(REPARENT_S, self._follow, sending)

    def ask(self, name: str, manifest: Manifest) -> None:
        """The worker needs the object; does nothing while it is on its way there."""
        sending = self._sendings.get(manifest.object_root)
        if sending is None or name in sending.way.nodes or name in sending.waiting:
            return
        if sending.way.comes_back_whole(name):
            return
        if not sending.waiting:
            asyncio.get_running_loop().call_later(GATHER_S, self._place, sending)
        sending.waiting[name] = None

    def share(self, name: str, root: str) -> float:
        """Of the object that is here."""
        sending = self._sendings.get(root)
        return 0.0 if sending is None else sending.way.share(name)

    def drop(self, name: str, root: str) -> None:
        """The worker wants it no more: it serves nobody either."""
        sending = self._sendings.get(root)
        if sending is not None and sending.way.share(name) < 1 and sending.plan is not None:
            sending.plan = without(sending.plan, name)
            sending.way.leave(name)
            self._follow(sending)

    def _whole(self, root: str, name: str) -> None:
        if self._reachable[name] and self._topology is not Topology.STAR:
            self._sendings[root].idle[name] = None
        if (relay := self._relays.get(name)) is not None:
            relay.whole(root)

    # ---- plans -------------------------------------------------------------------------------------------------

    def _place(self, sending: Sending) -> None:
        waiting, sending.waiting = [name for name in sending.waiting if name in self._relays], {}
        if sending.plan is None or len(sending.way.nodes) == 1:
            self._begin(sending, waiting)
            return
        crowd = self._candidates(sending) if len(sending.idle) < ENOUGH_IDLE + len(waiting) else None
        for node in in_order([self._node(name) for name in waiting]):
            self._append(sending, node, crowd if crowd is not None else self._idle(sending))

    def _begin(self, sending: Sending, names: list[str]) -> None:
        sending.plan = self._plan(sending.manifest, names)
        self._predicted_s, self._bound_s = sending.plan.predicted_share_s, sending.plan.bound_s
        self._follow(sending)

    def _follow(self, sending: Sending) -> None:
        if sending.plan is not None and self._sendings.get(sending.manifest.object_root) is sending:
            sending.way.follow(sending.plan)

    def _plan(self, manifest: Manifest, names: list[str]) -> Plan:
        """The same question is answered once: planning for thousands takes seconds."""
        nodes, size = [self._node(name) for name in sorted(names)], manifest.object_size
        chunk, uplink = manifest.chunk_size, self._accesses[SEED].up.capacity
        question = (nodes, size, uplink)
        if self._last is None or self._last[0] != question:
            previous = () if self._last is None else self._last[1].chains
            plan = make_plan(self._topology, nodes, uplink, size, chunk, LATENCY_S, self._gamma, previous)
            self._last = question, plan
        return self._last[1]

    def _node(self, name: str) -> Node:
        access = self._accesses[name]
        return Node(name, access.up.capacity, access.down.capacity, self._reachable[name])

    def _candidates(self, sending: Sending) -> dict[str, Candidate]:
        """Who may feed one more node, as the production director sees it."""
        assert sending.plan is not None, "begun"
        fed: Counter[str] = Counter()
        gets: defaultdict[str, float] = defaultdict(float)
        for stream in sending.plan.streams:
            fed[stream.parent] += sending.way.share(stream.child) < 1
            gets[stream.child] += stream.rate_bytes_per_s
        uplink = self._accesses[SEED].up.capacity
        candidates = {SEED: Candidate(SEED, uplink / (fed[SEED] + 1), fed[SEED], True)}
        for name in gets if self._topology is not Topology.STAR else ():
            if name in self._relays and self._reachable[name]:
                rate, is_whole = self._accesses[name].up.capacity / (fed[name] + 1), sending.way.share(name) == 1
                candidates[name] = Candidate(name, rate if is_whole else min(rate, gets[name]), fed[name], is_whole)
        return candidates

    def _idle(self, sending: Sending) -> dict[str, Candidate]:
        """A few of those that the production rules prefer: looking at thousands for each that comes late is dear."""
        names = islice(sending.idle, ENOUGH_IDLE)
        return {name: Candidate(name, self._accesses[name].up.capacity, 0, True) for name in names}

    def _append(self, sending: Sending, node: Node, candidates: dict[str, Candidate]) -> None:
        assert sending.plan is not None, "begun"
        parent = best_parent(node, list(candidates.values()))
        everything = whole(sending.way.chunks)
        order = everything if parent.whole else order_at(sending.plan, parent.node_id) or everything
        rate = min(parent.rate_bytes_per_s, node.down_bytes_per_s)
        stream = Stream(parent.node_id, node.node_id, order, rate)
        sending.plan = joined(sending.plan, stream)
        sending.way.add(stream)
        sending.idle.pop(parent.node_id, None)
        busier = parent.rate_bytes_per_s * (parent.children + 1) / (parent.children + 2)
        candidates[parent.node_id] = msgspec.structs.replace(
            parent, rate_bytes_per_s=busier, children=parent.children + 1
        )
        if self._topology is not Topology.STAR and node.reachable:
            candidates[node.node_id] = Candidate(node.node_id, min(node.up_bytes_per_s, rate), 0, False)
