"""Tree: for a learner that sends slower than workers do.

Invariant: a worker feeds as many others as its uplink carries at the stream's rate, the best workers nearest to the
learner, so depth grows with the logarithm of their number; nodes that cannot be dialled are leaves.
"""

from __future__ import annotations

from collections import deque

from echo2.broadcast.plan.draft import MEASURING_SLACK, Draft, Problem, whole
from echo2.broadcast.plan.fluid import forest_draft
from echo2.broadcast.plan.model import SEED, Topology

WIDEST = 4
"""Most streams that a typical worker's own rate is divided into, for objects so small that depth is all that counts."""


def tree(problem: Problem) -> Draft:
    """The tree that is soonest done, among stream rates of min(B_0, r/k)."""
    rates = sorted({min(problem.uplink_bytes_per_s, problem.rate / k) for k in range(1, WIDEST + 1)}, reverse=True)
    return min((_grow(problem, rate) for rate in rates), key=lambda draft: draft.share_s(problem.share))


def _grow(problem: Problem, rate: float) -> Draft:
    """Breadth first; fan-out ⌊u/rate⌋, at least 1."""
    slots = deque([SEED] * _fan_out(problem, problem.uplink_bytes_per_s, rate))
    parents: dict[str, str] = {}
    for node in problem.nodes:
        parents[node.node_id] = slots.popleft() if slots else SEED
        if node.reachable:
            slots.extend([node.node_id] * _fan_out(problem, node.up_bytes_per_s, rate))
    return forest_draft(problem, Topology.TREE, parents, dict.fromkeys(parents, whole(problem.chunks)))


def _fan_out(problem: Problem, uplink: float, rate: float) -> int:
    return max(1, min(int(uplink * (1 + MEASURING_SLACK) / rate), len(problem.nodes)))
