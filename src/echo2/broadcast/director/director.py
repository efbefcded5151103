"""Decides who feeds whom.

    joined, left, reachable, reports, egress ──▶ Director ──▶ assignments, one per node and object
                            publish, withdraw ──▶

Invariant: what is sent out is a function of what came in and of the times given with it. Between publishes there is one
standing plan over all nodes, whose links stay warm; an object's plan keeps its links as far as it can. Pure.

A node that fails needs no decision here: its children know whom to turn to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from echo2.broadcast.director.assignments import Assignments
from echo2.broadcast.director.fleet import Fleet
from echo2.broadcast.director.late import Candidate, best_parent
from echo2.broadcast.director.pacing import Pacing, paces
from echo2.broadcast.director.transfer import ObjectFacts, Transfer
from echo2.broadcast.plan.draft import in_order, whole
from echo2.broadcast.plan.make import make_plan
from echo2.broadcast.plan.model import SEED, Node, Plan, Stream, Topology
from echo2.broadcast.plan.repair import joined, order_at, without
from echo2.broadcast.relay.control import NodeState
from echo2.broadcast.relay.frames import Assign, Report, Source

SETTLE_S, MOST_SETTLE_S = 0.3, 2.0
"""The standing plan is made when so long nothing changed; at the latest after the second."""
MOST_REVISIONS = 3
"""Times that new rates alone change the standing plan, between changes of the fleet and transfers: new links show new
rates, and where those vary by themselves that would never end."""
REVISE_S = 5.0
"""…and at most so often: links are warmed one after another, and what some of them show is not yet a picture."""
MOST_BUSY_S = 10.0
"""It waits so long for objects under way: links that are warmed take bytes from theirs."""
GATHER_S = 0.6
"""Who asks within so long of the first is planned together with it: nodes report every half second."""
PROBE_S = 1.0
"""…and for so long it is waited for nodes that are just being dialled back."""
LATE_S = 0.5
"""Without a tick for longer the seed stood still itself, and could not read what nodes told (field report H05)."""
LATENCY_S = 0.02
"""One way, taken for every link: plans hardly depend on it."""
USUAL_BYTES, USUAL_CHUNK_BYTES = 64 * 1024 * 1024, 256 * 1024
"""What the standing plan is made for before anything was published."""
TELLING_BYTES = 4 * 1024 * 1024
"""Smaller objects measure latency, not rates; nor do they fill a queue."""


class Director:
    def __init__(self, topology: Topology, gamma: float) -> None:
        """gamma: the share 1/gamma of the nodes is what a broadcast's time counts for."""
        self._topology = topology
        self._gamma = gamma
        self._fleet = Fleet()
        self._transfers: dict[str, Transfer] = {}
        """By object, in the order in which they were published."""
        self._standing: Plan | None = None
        self._standing_links = Assignments(b"")
        self._changed_s = self._changed_since_s = float("inf")
        """When the fleet changed last, and first, since the standing plan; infinite for never."""
        self._revisions = 0
        self._stood_s = float("-inf")
        """When the standing plan was made."""
        self._was_busy = False
        self._ticked_s = float("-inf")
        self._pacing = Pacing()
        self._usual = (USUAL_BYTES, USUAL_CHUNK_BYTES)
        self._outbox: list[tuple[str, Assign]] = []
        self.predicted_s = 0.0
        """Of the newest object's plan, for the share that counts; 0 before the first."""
        self.bound_s = 0.0

    # ---- nodes -------------------------------------------------------------------------------------------------

    def node_joined(self, node_id: str, host: str, port: int, now: float) -> None:
        """Its link to the seed is up, for the first time or again."""
        self._fleet.join(Source(node_id, host, port))
        self._standing_links.forget(node_id)
        for transfer in self._transfers.values():
            transfer.tell_again(node_id)
        self._changed(now)

    def node_left(self, node_id: str, now: float) -> None:
        self._fleet.leave(node_id)
        for transfer in self._transfers.values():
            transfer.waiting.pop(node_id, None)
        self._changed(now)

    def reachability(self, source: Source, reachable: bool, now: float) -> None:
        """Whether the node could be dialled back there."""
        if self._fleet.probed(source, reachable, now):
            self._changed(now)

    def probes_due(self, now: float) -> list[Source]:
        """Nodes that shall be dialled back again, each told once."""
        return self._fleet.probes_due(now)

    def report(self, node_id: str, report: Report, now: float) -> None:
        member = self._fleet.members.get(node_id)
        if member is None:
            return
        if self._fleet.report(node_id, report, now):
            self._changed(now)
        newest = self._newest_delta()
        for transfer in self._transfers.values():
            transfer.report(node_id, report, transfer is newest, now)

    def egress(self, bytes_per_s: float, now: float) -> None:
        """All that the seed sends, at its best in the newest transfer."""
        self._fleet.rates.egress(bytes_per_s)

    # ---- objects -----------------------------------------------------------------------------------------------

    def publish(self, facts: ObjectFacts, now: float) -> None:
        """A delta goes to all that hold its base, at once; an anchor to those that ask."""
        if facts.root in self._transfers:
            return
        transfer = self._transfers[facts.root] = Transfer(facts)
        if facts.base_root:
            self._usual = (facts.size_bytes, facts.chunk_bytes)
        newest = self._newest_delta()
        for name, member in self._fleet.members.items():
            transfer.report(name, member.report, transfer is newest, now)
        if facts.base_root and transfer.waiting:
            self._begin(transfer, now)

    def withdraw(self, root: str) -> None:
        self._transfers.pop(root, None)

    def take(self) -> list[tuple[str, Assign]]:
        """What to send now, in order. Assignments for the seed are for its own relay."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """About ten times a second."""
        late_s, self._ticked_s = now - self._ticked_s, now
        self._stand(now)
        for transfer in self._transfers.values():
            if late_s > LATE_S:
                transfer.stood_still(late_s - LATE_S, now)
            self._place_waiting(transfer, now)
            self._pass_by_slow(transfer, now)
            if transfer.stale:
                self._tell(transfer)

    def _changed(self, now: float, revisions: int = 0) -> None:
        self._changed_s, self._changed_since_s = now, min(now, self._changed_since_s)
        self._revisions = revisions

    def _stand(self, now: float) -> None:
        """Make the standing plan anew when the fleet changed, or a transfer showed how fast it is, and it is quiet."""
        self._notice(now)
        waited_s = now - self._changed_since_s
        quiet = now - self._changed_s >= SETTLE_S or waited_s >= MOST_SETTLE_S
        if not quiet or (self._was_busy and waited_s < MOST_BUSY_S):
            return
        self._changed_s = self._changed_since_s = float("inf")
        self._stood_s = now
        self._fleet.adopt()
        self._standing = self._make(self._fleet.members, *self._usual, now)
        news = self._standing_links.update(self._standing, self._fleet.where())
        to_nodes = [(name, assign) for name, assign in news if name != SEED]
        if to_nodes and not self._was_busy:  # else what is seen is the transfer, and is judged by its own plan
            self._measure(self._standing, relayed=False)
        self._outbox += to_nodes

    def _notice(self, now: float) -> None:
        """A transfer that ended, and rates that changed, are changes too."""
        was_busy, self._was_busy = self._was_busy, self._busy(now)
        if was_busy and not self._was_busy:
            self._changed(now)
        is_settled = self._changed_since_s > now and now - self._stood_s >= REVISE_S
        if is_settled and not self._was_busy and self._revisions < MOST_REVISIONS and self._fleet.moved():
            self._changed(now, self._revisions + 1)

    def _place_waiting(self, transfer: Transfer, now: float) -> None:
        """Give a part to those who came late, or together when nobody has the object yet."""
        if not transfer.waiting:
            return
        probing = any(self._fleet.members[name].reachable is None for name in transfer.waiting)
        if now - min(transfer.waiting.values()) < (PROBE_S if probing else GATHER_S):
            return
        if not self._holders(transfer):
            self._begin(transfer, now)
            return
        waiting, transfer.waiting = transfer.waiting, {}
        for node in in_order(self._fleet.nodes(waiting, now)):
            self._append(transfer, node, now)
        transfer.stale = True

    def _pass_by_slow(self, transfer: Transfer, now: float) -> None:
        """Those behind it get its parent, and it becomes a tail."""
        reports = {name: member.report for name, member in self._fleet.members.items()}
        for name in transfer.slow(reports, now):
            assert transfer.plan is not None, "slow in it"
            self._fleet.demote(name, now)
            transfer.plan = without(transfer.plan, name)
            self._append(transfer, self._fleet.node(name, now), now)
            transfer.stale = True

    # ---- plans -------------------------------------------------------------------------------------------------

    def _begin(self, transfer: Transfer, now: float) -> None:
        """Plan the object for those who wait for it."""
        facts = transfer.facts
        waiting, transfer.waiting = transfer.waiting, {}
        plan = self._make(waiting, facts.size_bytes, facts.chunk_bytes, now)
        transfer.begin(plan, now)
        newest = max(self._transfers.values(), key=lambda x: (x.facts.policy, bool(x.facts.base_root)))
        if transfer is newest:
            self.predicted_s, self.bound_s = plan.predicted_share_s, plan.bound_s
        rates = self._fleet.rates
        tells = facts.size_bytes >= TELLING_BYTES
        asked = sum(stream.rate_bytes_per_s for stream in plan.streams if stream.parent == SEED)
        held = tells and self._pacing.may_hold and not rates.explores(asked)
        transfer.paces = paces(plan, rates.knows) if held else {}
        if tells:
            self._measure(plan, relayed=True, held=held)
            self._pacing.count(held)
        self._tell(transfer)

    def _make(self, names: Collection[str], size_bytes: int, chunk_bytes: int, now: float) -> Plan:
        previous = self._standing.chains if self._standing is not None else ()
        nodes = self._fleet.nodes(names, now)
        uplink = self._fleet.uplink
        return make_plan(self._topology, nodes, uplink, size_bytes, chunk_bytes, LATENCY_S, self._gamma, previous)

    def _append(self, transfer: Transfer, node: Node, now: float) -> None:
        """Let one more node be fed by whoever can do that best."""
        facts = transfer.facts
        plan = transfer.plan or self._make((), facts.size_bytes, facts.chunk_bytes, now)
        parent = best_parent(node, self._candidates(transfer, now))
        everything = whole(transfer.chunks)
        if parent.node_id not in {SEED, *transfer.planned}:
            plan = joined(plan, Stream(SEED, parent.node_id, everything, 0.0))
        order = order_at(plan, parent.node_id) or everything
        rate = min(parent.rate_bytes_per_s, node.down_bytes_per_s)
        transfer.plan = joined(plan, Stream(parent.node_id, node.node_id, order, rate))

    def _candidates(self, transfer: Transfer, now: float) -> list[Candidate]:
        fed = self._children_served()
        candidates = [Candidate(SEED, self._fleet.uplink / (fed[SEED] + 1), fed[SEED], True)]
        if self._topology is Topology.STAR:
            return candidates
        plan, gets = transfer.present(self._fleet.members), defaultdict[str, float](float)
        for stream in plan.streams if plan is not None else ():
            gets[stream.child] += stream.rate_bytes_per_s
        for node in self._fleet.nodes(self._holders(transfer), now):
            name = node.node_id
            has_all = transfer.facts.root in self._fleet.members[name].report.complete
            rate = node.up_bytes_per_s / (fed[name] + 1)
            if node.reachable:
                candidates.append(Candidate(name, rate if has_all else min(rate, gets[name]), fed[name], has_all))
        return candidates

    def _holders(self, transfer: Transfer) -> list[str]:
        """Connected nodes that have the object or are getting it."""
        getting = transfer.unfinished(self._fleet.members)
        root = transfer.facts.root
        return [name for name, x in sorted(self._fleet.members.items()) if root in x.report.complete or name in getting]

    def _children_served(self) -> Counter[str]:
        """How many children each parent has that are not done, over all objects."""
        served: Counter[str] = Counter()
        for transfer in self._transfers.values():
            plan, unfinished = transfer.present(self._fleet.members), transfer.unfinished(self._fleet.members)
            pairs = {(x.parent, x.child) for x in plan.streams if x.child in unfinished} if plan is not None else ()
            served.update(parent for parent, _ in pairs)
        return served

    def _busy(self, now: float) -> bool:
        return any(transfer.is_under_way(self._fleet.members, now) for transfer in self._transfers.values())

    def _newest_delta(self) -> Transfer | None:
        deltas = [transfer for transfer in self._transfers.values() if transfer.facts.base_root]
        return max(deltas, key=lambda transfer: transfer.facts.policy, default=None)

    def _measure(self, plan: Plan, relayed: bool, held: bool = False) -> None:
        """What is seen from now on is seen under this plan."""
        planned: defaultdict[tuple[str, str], float] = defaultdict(float)
        for stream in plan.streams:
            planned[stream.parent, stream.child] += stream.rate_bytes_per_s
        self._fleet.rates.begin(planned, relayed, held)

    def _tell(self, transfer: Transfer) -> None:
        transfer.stale = False
        plan = transfer.present(self._fleet.members)
        if plan is not None:
            self._outbox += transfer.assignments.update(plan, self._fleet.where(), transfer.paces)

    # ---- for people --------------------------------------------------------------------------------------------

    def nodes(self) -> tuple[NodeState, ...]:
        """Every connected node, by name."""
        rates = self._fleet.rates.of(self._fleet.members)
        streams = self._standing.streams if self._standing is not None else ()
        parents = {stream.child: stream.parent for stream in sorted(streams, key=lambda x: x.parent != SEED)}
        return tuple(
            NodeState(
                name, self._fleet.reachable(name), *rates[name], parents.get(name, ""),
                member.report.sent_bytes, member.report.received_bytes, member.report.reparentings,
            )
            for name, member in sorted(self._fleet.members.items())
        )  # fmt: skip
