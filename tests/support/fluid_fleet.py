"""Nodes that do what a Director tells them, with bytes that flow like water, in virtual time.

Every sender divides what it can send fairly among its children; a child never has more than its parent. What nodes
measure they report as relays do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from echo2.broadcast.director import Director, ObjectFacts
from echo2.broadcast.plan.fluid import fair_shares
from echo2.broadcast.plan.model import SEED, Topology
from echo2.broadcast.relay.frames import Assign, Feed, Report, Source
from echo2.types import Policy

MB = 1e6
STEP_S = 0.1
BASE, NEXT = "b" * 64, "c" * 64
"""Decoded roots of a delta's base and of what it becomes."""


def facts(name: str = "d", version: int = 2, size_mb: float = 100.0, base_root: str = BASE) -> ObjectFacts:
    root = (name * 64)[:64]
    return ObjectFacts(root, root.encode(), int(size_mb * MB), 2**18, Policy(0, version), base_root, NEXT)


class FluidNode:
    def __init__(self, up: float, down: float) -> None:
        self.up, self.down = up, down
        self.report = Report(held=(BASE,))
        self.standing: Assign | None = None
        self.parts: dict[bytes, Assign] = {}
        self.got: dict[bytes, float] = {}
        self.linked: set[str] = set()
        self.peaks: dict[str, float] = {}


class FluidFleet:
    def __init__(
        self, rates_mb: Mapping[str, tuple[float, float]], uplink_mb: float, topology: Topology = Topology.CHAIN,
        unreachable: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """rates_mb: up and down of each node, in megabytes per second."""
        self.now = 0.0
        self.topology = topology
        self.uplink = uplink_mb * MB
        self.nodes = {name: FluidNode(up * MB, down * MB) for name, (up, down) in rates_mb.items()}
        self.unreachable = set(unreachable)
        self.connected: set[str] = set()
        self.objects: dict[bytes, ObjectFacts] = {}
        self.seed_parts: dict[bytes, Assign] = {}
        self.told: set[tuple[str, bytes]] = set()
        """Who was told its part in which object by the present seed."""
        self.messages: list[tuple[str, Assign]] = []
        """All that the director ever sent."""
        self.director = Director(topology, 1.1)
        self._measurements = 0

    # ---- what happens ------------------------------------------------------------------------------------------

    def join(self, *names: str) -> None:
        """At once: their warm-ups share the seed's uplink."""
        names = names or tuple(sorted(self.nodes))
        for name in names:
            self.connected.add(name)
            self.director.node_joined(name, f"{name}.test", 7000, self.now)
            self.director.reachability(Source(name, f"{name}.test", 7000), name not in self.unreachable, self.now)
        rates = fair_shares(self.uplink, [self.nodes[name].down for name in names])
        self.director.egress(sum(rates), self.now)
        for name, rate in zip(names, rates, strict=True):
            self.say(name, edges=self.nodes[name].report.edges | {SEED: self.measured(rate)})

    def leave(self, *names: str) -> None:
        for name in names:
            self.connected.discard(name)
            self.director.node_left(name, self.now)

    def restart_seed(self) -> None:
        """Nodes keep what they have and what they were told; the new seed knows nothing."""
        self.connected.clear()
        self.seed_parts.clear()
        self.told.clear()
        self.director = Director(self.topology, 1.1)
        for node in self.nodes.values():
            node.linked.clear()

    def measured(self, rate: float) -> float:
        """No two measurements are quite the same."""
        self._measurements += 1
        return rate * (1 - 1e-6 * (self._measurements % 1000))

    def say(self, name: str, **changes: object) -> None:
        node = self.nodes[name]
        node.report = msgspec.structs.replace(node.report, **changes)
        self.director.report(name, node.report, self.now)

    def publish(self, published: ObjectFacts) -> None:
        self.objects[published.manifest] = published
        self.director.publish(published, self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.director.tick(self.now)
            self._deliver()
            self._flow()

    def broadcast(self, published: ObjectFacts, limit_s: float = 200.0) -> float:
        """Publish; seconds until all connected nodes have it."""
        self.publish(published)
        began_s = self.now
        while any(published.root not in self.nodes[name].report.complete for name in self.connected):
            self.run(STEP_S)
            assert self.now - began_s < limit_s, "somebody never got it"
        took_s = self.now - began_s
        self.run(1.0)
        return took_s

    # ---- what can be seen --------------------------------------------------------------------------------------

    def parents(self, published: ObjectFacts | None = None) -> dict[str, str]:
        """Whom each connected node asks first, in the standing plan or for an object."""
        parents = {}
        for name in sorted(self.connected):
            node = self.nodes[name]
            part = node.standing if published is None else node.parts.get(published.manifest)
            if part is not None and part.feeds:
                parents[name] = self._asked(part.feeds[0])
        return parents

    def _asked(self, feed: Feed) -> str:
        """The first source that is there."""
        return next(source.node_id for source in feed.sources if source.node_id in {SEED, *self.connected})

    def heads(self, published: ObjectFacts | None = None) -> list[str]:
        return [child for child, parent in self.parents(published).items() if parent == SEED]

    # ---- how it goes on ----------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        linked = []
        for name, assign in self.director.take():
            self.messages.append((name, assign))
            self.told.add((name, assign.manifest))
            if name == SEED:
                self.seed_parts[assign.manifest] = assign
            elif assign.manifest:
                self.nodes[name].parts[assign.manifest] = assign
                self.nodes[name].got.setdefault(assign.manifest, 0.0)
                self.nodes[name].peaks = {}
            else:
                self.nodes[name].standing = assign
                linked.append(name)
        self._warm(linked)

    def _warm(self, names: list[str]) -> None:
        """New links to first parents are measured, all at once."""
        children = defaultdict(list)
        for name in names:
            node, parent = self.nodes[name], self.parents().get(name, SEED)
            if parent != SEED and parent not in node.linked:
                node.linked.add(parent)
                children[parent].append(name)
        for parent, fed in children.items():
            shares = fair_shares(self.nodes[parent].up, [self.nodes[name].down for name in fed])
            for name, rate in zip(fed, shares, strict=True):
                self.say(name, edges=self.nodes[name].report.edges | {parent: self.measured(rate)})

    def _flow(self) -> None:
        feeding: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
        paces: dict[tuple[str, str, bytes], float] = {}
        for name in sorted(self.connected):
            for manifest, part in self.nodes[name].parts.items():
                if self.nodes[name].got[manifest] < self.objects[manifest].size_bytes:
                    for feed in part.feeds:
                        up = self._asked(feed)
                        self._check_known(up, name, manifest)
                        feeding[up].append((name, manifest))
                        if feed.pace_bytes_per_s and up == feed.sources[0].node_id:
                            paces[up, name, manifest] = feed.pace_bytes_per_s
        gains: dict[tuple[str, bytes], float] = defaultdict(float)
        inflow: dict[str, float] = defaultdict(float)
        for parent in self._downwards(feeding):
            pairs = feeding[parent]
            demands = [
                min(self._demand(parent, child, manifest, gains), paces.get((parent, child, manifest), float("inf")))
                for child, manifest in pairs
            ]
            shares = fair_shares(self.uplink if parent == SEED else self.nodes[parent].up, demands)
            if parent == SEED and pairs:
                self.director.egress(sum(shares), self.now)
            sent: dict[str, float] = defaultdict(float)
            for (child, manifest), share in zip(pairs, shares, strict=True):
                rate = min(share, self.nodes[child].down - inflow[child])
                gains[child, manifest] += rate
                inflow[child] += rate
                sent[child] += rate
            for child, rate in sent.items():
                if rate > 1.01 * self.nodes[child].peaks.get(parent, 0.0):
                    self.nodes[child].peaks[parent] = self.measured(rate)
        for (name, manifest), rate in gains.items():
            self.nodes[name].got[manifest] += rate * STEP_S
        if gains:
            self._report({name for name, _ in gains})

    def _downwards(self, feeding: Mapping[str, list[tuple[str, bytes]]]) -> list[str]:
        """Senders, each after those that feed it as far as there is a first."""
        order = [SEED]
        for parent in order:
            order += [c for c in dict.fromkeys(child for child, _ in feeding.get(parent, ())) if c not in order]
        return order + [parent for parent in feeding if parent not in order]

    def _demand(self, parent: str, child: str, manifest: bytes, gains: Mapping[tuple[str, bytes], float]) -> float:
        """A child that has what its parent has is as fast as its parent."""
        node, size = self.nodes[child], self.objects[manifest].size_bytes
        alone = len(node.parts[manifest].feeds) == 1
        if parent == SEED or not alone or self.nodes[parent].got.get(manifest, 0.0) >= size:
            return node.down
        ahead = self.nodes[parent].got.get(manifest, 0.0) - node.got[manifest] - self.objects[manifest].chunk_bytes
        return min(node.down, max(ahead / STEP_S, 0.0) + gains[parent, manifest])

    def _check_known(self, parent: str, child: str, manifest: bytes) -> None:
        part = self.seed_parts.get(manifest) if parent == SEED else self.nodes[parent].parts.get(manifest)
        if part is not None and {(parent, manifest), (child, manifest)} <= self.told:
            assert child in part.children, f"{parent} must know that {child} may ask it"

    def _report(self, names: set[str]) -> None:
        for name in sorted(names):
            node = self.nodes[name]
            whole = {m for m, got in node.got.items() if got >= self.objects[m].size_bytes - 1}
            roots = {self.objects[m].root for m in whole}
            under_way = {
                self.objects[m].root: int(got / self.objects[m].chunk_bytes)
                for m, got in node.got.items()
                if m not in whole
            }
            needs = tuple(root for root in node.report.needs if root not in roots)
            done = tuple(sorted({*node.report.complete, *roots}))
            edges = node.report.edges | node.peaks
            self.say(name, complete=done, progress=under_way, needs=needs, edges=edges)
