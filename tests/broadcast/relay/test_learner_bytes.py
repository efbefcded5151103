"""What the learner's uplink carries when a publish goes to fifty workers (field report H09).

The real cores and the real director in virtual time, with one line out of the seed that all its links share.
"""

from __future__ import annotations

from collections import Counter

from virtual_relays import Relays, object_manifest

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.plan.model import SEED, Topology
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay import links as ln
from echo2.broadcast.relay.seed import Seed
from echo2.broadcast.relay.server import SEED_ORPHANS

WORKERS = tuple(f"w{number:02}" for number in range(50))
LINES = 8
"""B_0 / B_w: so many workers' lines fit into the seed's."""
MANIFEST = object_manifest(70)
SIGNED = b"signed"
JOINED_S = 40.0
"""By then everybody is connected and the uplink is measured."""


class DirectedRelays(Relays):
    """Relays whose seed has its director, and an uplink of ``LINES`` lines."""

    def __init__(self, topology: Topology) -> None:
        self.seed = Seed(topology, 1.1, "")
        self.delivered: Counter[int] = Counter()
        """Bytes of every kind that arrived over each link of the seed."""
        self._line_free_s = 0.0
        super().__init__(WORKERS)
        for name in WORKERS:
            self.nodes[name].hold((MANIFEST.base_root,))

    def publish(self, manifest: Manifest) -> None:
        self._manifests[manifest.object_root] = manifest
        self.nodes[SEED].publish(manifest, self.now)
        self.seed.publish(manifest, SIGNED, self.now)
        self.act(SEED)

    def act(self, name: str) -> None:
        if name == SEED:
            self.seed.send(self.nodes[SEED], self.now)
        super().act(name)

    def heads(self) -> list[str]:
        """Of the standing plan."""
        return [node.node_id for node in self.seed.director.nodes() if node.parent == SEED]

    def _tick(self, name: str) -> None:
        super()._tick(name)
        if name == SEED:
            acked = {number: count for number, count in self.delivered.items() if (SEED, number) in self._ends}
            self.seed.tick(acked, self.nodes[SEED], self.now)
            self.act(SEED)

    def _connect(self, name: str, peer: str, lane: int) -> None:
        super()._connect(name, peer, lane)
        if peer == SEED:
            number = max(number for (owner, number), end in self._ends.items() if owner == SEED and end[0] == name)
            source = self.seed.link_up(number, name, f"{name}.test", 1, self.now)
            self.seed.director.reachability(source, True, self.now)

    def _down(self, name: str, number: int, why: str) -> None:
        if name == SEED:
            self.seed.link_down(number, self.now)
        super()._down(name, number, why)

    def _carry(self, name: str, number: int) -> None:
        """The seed's links take turns on its line."""
        if name == SEED and self._line_free_s > self.now:
            self.at(self._line_free_s - self.now, lambda: self._carry(name, number))
            return
        super()._carry(name, number)
        took_s = self._busy_until.get((name, number), 0.0) - self.now
        if name == SEED and took_s > 0:
            self._line_free_s = self.now + took_s / LINES

    def _deliver(self, sender: str, name: str, number: int, out: ln.Out, nbytes: int) -> None:
        if sender == SEED and (name, number) in self._ends:
            self.delivered[self._ends[name, number][1]] += nbytes
        frame = f.decode_control(out[f.HEADER.size :]) if isinstance(out, bytes) else None
        if isinstance(frame, f.Assign):
            self.nodes[name].heard(number, self.now)
            self.nodes[name].assign(frame, MANIFEST if frame.manifest else None, self.now)
            self.act(name)
            return
        if isinstance(frame, f.Report) and name == SEED:
            self.seed.report(number, frame, self.now)
        super()._deliver(sender, name, number, out, nbytes)


def standing(topology: Topology) -> DirectedRelays:
    relays = DirectedRelays(topology)
    relays.run(JOINED_S)
    return relays


def copies_sent(relays: DirectedRelays) -> float:
    return relays.nodes[SEED].report().sent_bytes / MANIFEST.object_size


def test_h09_a_publish_to_fifty_workers_costs_the_learner_one_copy_per_chain() -> None:
    relays = standing(Topology.CHAIN)
    before = relays.delivered.total()
    relays.publish(MANIFEST)
    took_s = relays.run_until_whole(MANIFEST.object_root, WORKERS, 60.0)
    chains, size = len(relays.heads()), MANIFEST.object_size
    assert LINES - 1 <= chains <= LINES
    assert copies_sent(relays) <= chains
    assert relays.delivered.total() - before <= (chains + 0.1) * size, (
        "control frames and measurements are small beside it"
    )
    assert took_s < 2 * size / relays.rate, "nobody waited for a learner that sent fifty copies"
    received = sum(relays.nodes[name].report().received_bytes for name in WORKERS)
    assert received == len(WORKERS) * size


def test_h09_heads_that_die_in_the_middle_cost_the_learner_their_orphans_and_no_more() -> None:
    relays = standing(Topology.CHAIN)
    relays.publish(MANIFEST)
    chains = len(relays.heads())
    dying = relays.heads()[:2]
    relays.run(0.5)
    for name in dying:
        relays.kill(name)
    alive = [name for name in WORKERS if name not in dying]
    relays.run_until_whole(MANIFEST.object_root, alive, 60.0)
    assert copies_sent(relays) <= chains + SEED_ORPHANS


def test_h09_a_star_costs_the_learner_a_copy_per_worker() -> None:
    """What the bound above is worth, and that it measures what it says."""
    relays = standing(Topology.STAR)
    relays.publish(MANIFEST)
    relays.run_until_whole(MANIFEST.object_root, WORKERS, 60.0)
    assert copies_sent(relays) == len(WORKERS)
