"""The seed's side of the relays: who is connected, what the director wants them to do, how fast the uplink is.

Invariant: a node is connected while its newest link of lane 0 is up; its reports are taken over that link alone. The
uplink's rate is counted in bytes that arrived, so full send buffers do not look like speed. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from echo2.broadcast.director import Director, ObjectFacts
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.plan.model import SEED, Topology
from echo2.broadcast.relay.control import Tally
from echo2.broadcast.relay.frames import Probe, Report, Source
from echo2.broadcast.relay.meter import RateMeter, is_flow
from echo2.broadcast.relay.node import Node
from echo2.errors import Malformed

TALLY_S = 1.0
PROBE_AFTER_S = 10.0
"""Quiet after the last node joined: by then the nodes' links to one another are warm and would not disturb."""
PROBE_GROWTH = 1.5
"""The uplink is measured again when the fleet has grown by so much."""
_LOOPBACK = ("127.0.0.1", "::1")


class Seed:
    def __init__(self, topology: Topology, gamma: float, advertised_host: str) -> None:
        self.director = Director(topology, gamma)
        self._advertised_host = advertised_host
        self._links: dict[str, int] = {}
        """Lane 0 of each connected node."""
        self._signed: dict[bytes, Manifest] = {}
        """Published objects by the signed bytes of their manifests."""
        self._acked: dict[int, int] = {}
        self._ticked_s = float("-inf")
        self._arrived = 0
        """Bytes that arrived over all links so far."""
        self._meter = RateMeter()
        self._egress = 0.0
        self._probed = 1
        """Nodes that were there when the uplink was measured last."""
        self._quiet_since_s = float("-inf")
        self._told: Tally | None = None
        self._tally_s = float("-inf")

    def link_up(self, number: int, peer: str, host: str, port: int, now: float) -> Source:
        """A node came; return where it may be dialled. One of this machine is reached under the seed's own name."""
        if host in _LOOPBACK and self._advertised_host not in ("", *_LOOPBACK):
            host = self._advertised_host
        self._links[peer] = number
        self._quiet_since_s = now
        self.director.node_joined(peer, host, port, now)
        return Source(peer, host, port)

    def link_down(self, number: int, now: float) -> None:
        self._acked.pop(number, None)
        for peer, link in list(self._links.items()):
            if link == number:
                del self._links[peer]
                self.director.node_left(peer, now)

    def probes_due(self, now: float) -> list[tuple[Source, int]]:
        """Nodes that shall be dialled back again, each told once, and their links."""
        return [(source, self._links[source.node_id]) for source in self.director.probes_due(now)]

    def probed(self, source: Source, number: int, reachable: bool, now: float) -> None:
        """An answer about an earlier life of the node, which had another link, says nothing of this one."""
        if self._links.get(source.node_id) == number:
            self.director.reachability(source, reachable, now)

    def report(self, number: int, report: Report, now: float) -> None:
        """Raises Malformed when it does not come over a node's lane 0."""
        for peer, link in self._links.items():
            if link == number:
                self.director.report(peer, report, now)
                return
        raise Malformed("reports come over lane 0")

    def publish(self, manifest: Manifest, signed: bytes, now: float) -> None:
        self._signed[signed] = manifest
        self.director.publish(
            ObjectFacts(
                root=manifest.object_root,
                manifest=signed,
                size_bytes=manifest.object_size,
                chunk_bytes=manifest.chunk_size,
                policy=manifest.policy,
                base_root=manifest.base_root,
                decoded_root=manifest.decoded_root,
            ),
            now,
        )

    def withdraw(self, root: str) -> None:
        self._signed = {signed: m for signed, m in self._signed.items() if m.object_root != root}
        self.director.withdraw(root)

    def send(self, node: Node, now: float) -> None:
        """Hand out what the director decided."""
        for peer, assignment in self.director.take():
            if peer == SEED:
                manifest = self._signed.get(assignment.manifest)
                if manifest is not None:
                    node.assign(assignment, manifest, now)
            elif peer in self._links:
                node.say(self._links[peer], assignment)

    def tick(self, acked: Mapping[int, int], node: Node, now: float) -> Tally | None:
        """acked: bytes that arrived, per link, since it was made. Returns a tally when there is news."""
        gains = [total - self._acked.get(number, 0) for number, total in acked.items()]
        self._arrived += sum(gained for gained in gains if is_flow(gained, now - self._ticked_s))
        self._acked, self._ticked_s = dict(acked), now
        self._meter.sample(self._arrived, now)
        peak = self._meter.peak_bytes_per_s()
        if peak > 0 and abs(peak - self._egress) > 0.02 * self._egress:
            self._egress = peak
            self.director.egress(peak, now)
        self.director.tick(now)
        self._probe(node, now)
        return self._news(node, now)

    def _probe(self, node: Node, now: float) -> None:
        """Measure the uplink of a fleet that has grown, with everybody pulling at once."""
        if node.is_sending:
            self._quiet_since_s = now
        if len(self._links) < PROBE_GROWTH * self._probed or now - self._quiet_since_s < PROBE_AFTER_S:
            return
        self._probed = len(self._links)
        for link in self._links.values():
            node.say(link, Probe())

    def _news(self, node: Node, now: float) -> Tally | None:
        if now - self._tally_s < TALLY_S:
            return None
        tally = msgspec.structs.replace(
            node.tally(),
            uplink_bytes_per_s=self._egress,
            nodes=self.director.nodes(),
            predicted_s=self.director.predicted_s,
            bound_s=self.director.bound_s,
        )
        self._tally_s = now
        if tally == self._told:
            return None
        self._told = tally
        return tally
