"""Ring: the learner sends each byte once, for egress that is billed.

    learner ─ stripe 0 ─▶ head 0 ─▶ … ─▶ tail 0 ─┐        Stripe j goes down line j; when a head has its stripe, it goes
    learner ─ stripe 1 ─▶ head 1 ─▶ … ─▶ tail 1 ─│┐       on with stripes j−1, j−2 … from the tail of line j−1, whose
              └────────── stripes 0, N−1 … ◀─────┘│       uplink is idle. Everybody in line j gets j, j−1, … in turn.

Invariant: the learner's egress is exactly G, and a worker receives one stream and sends one at any time: a head hears
its tail after the learner, so the rates of its two streams are never due at once. One ring is as slow as its slowest
member: who is too slow, or cannot be dialled, hangs on a member beside the ring.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from echo2.broadcast.plan.bound import quick_count
from echo2.broadcast.plan.draft import Draft, Problem, relay_rate
from echo2.broadcast.plan.fluid import fair_shares
from echo2.broadcast.plan.lines import line_count, stand
from echo2.broadcast.plan.model import MOST_STRETCHES, SEED, Node, Stream, Stretch, Topology


def ring(problem: Problem) -> Draft:
    """With all reachable nodes, or without the slowest where that is sooner done for the share that counts."""
    able = len(problem.reachable)
    drafts = [_closed(problem, able), _closed(problem, min(able, quick_count(len(problem.nodes), problem.share)))]
    return min(drafts, key=lambda draft: draft.share_s(problem.share))


def _closed(problem: Problem, count: int) -> Draft:
    """A ring of the first ``count`` nodes, the others beside it."""
    members, beside = problem.nodes[:count], problem.nodes[count:]
    inner = msgspec.structs.replace(problem, nodes=members)
    lines, _ = stand(inner, min(line_count(inner), problem.chunks, MOST_STRETCHES))
    rate = min(problem.uplink_bytes_per_s, *(relay_rate(node) for node in members))
    leaves, rate = _hang(members, beside, rate)
    streams, finish_s = _around(problem, lines, rate)
    receiving_s = min(finish_s.values()) - problem.latency_s
    orders: dict[str, tuple[Stretch, ...]] = {}
    for stream in streams:
        orders[stream.child] = orders.get(stream.child, ()) + stream.stretches
    for parent, leaf, leaf_rate in leaves:
        streams.append(Stream(parent, leaf, orders[parent], leaf_rate))
        late_s = max(problem.size_bytes / leaf_rate - receiving_s, 0.0)
        finish_s[leaf] = finish_s[parent] + late_s + problem.hop_s(leaf_rate)
    chains = tuple(tuple(node.node_id for node in line) for line in lines)
    return Draft(Topology.RING, tuple(streams), finish_s, chains)


def _hang(
    members: tuple[Node, ...], beside: tuple[Node, ...], rate: float
) -> tuple[list[tuple[str, str, float]], float]:
    """Each node beside the ring to the member with most to spare: (member, node, rate); and what the ring keeps."""
    spare = {member: member.up_bytes_per_s - rate for member in members}
    hung: dict[Node, list[Node]] = {}
    for node in beside:
        parent = max(spare, key=lambda member: spare[member])
        spare[parent] -= min(node.down_bytes_per_s, rate)
        hung.setdefault(parent, []).append(node)
    leaves: list[tuple[str, str, float]] = []
    for parent, nodes in hung.items():
        demands = [rate, *(min(node.down_bytes_per_s, rate) for node in nodes)]
        own, *shares = fair_shares(parent.up_bytes_per_s, demands)
        leaves += [(parent.node_id, node.node_id, share) for node, share in zip(nodes, shares, strict=True)]
        rate = min(rate, own)
    return [(parent, node, min(share, rate)) for parent, node, share in leaves], rate


def _around(problem: Problem, lines: list[list[Node]], rate: float) -> tuple[list[Stream], dict[str, float]]:
    count, hop_s = len(lines), problem.hop_s(rate)
    seed_rate = min(problem.uplink_bytes_per_s / count, rate)
    ends = [problem.chunks * j // count for j in range(count + 1)]
    stripes = [Stretch(first, end - first) for first, end in pairwise(ends)]
    stripe_s = problem.size_bytes / count / rate
    turns_s = sorted(max(stripe_s, len(line) * hop_s) for line in lines)  # a short stripe waits for the line's tail
    head_s = problem.size_bytes / count / seed_rate + sum(turns_s[1:]) + problem.latency_s
    streams: list[Stream] = []
    for j, line in enumerate(lines):
        turn = tuple(stripes[(j - k) % count] for k in range(count))
        head = line[0].node_id
        streams.append(Stream(SEED, head, turn[:1], seed_rate, spills=False))
        if count > 1:
            streams.append(Stream(lines[j - 1][-1].node_id, head, turn[1:], rate))
        streams += [Stream(a.node_id, b.node_id, turn, rate) for a, b in pairwise(line)]
    return streams, {node.node_id: head_s + k * hop_s for line in lines for k, node in enumerate(line)}
