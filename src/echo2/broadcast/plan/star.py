"""Star: everybody straight from the learner, the paper's baseline without peers.

Invariant: no worker sends a byte. With B_0 below the sum of the workers' rates, time grows with their number.
"""

from __future__ import annotations

from echo2.broadcast.plan.draft import Draft, Problem, whole
from echo2.broadcast.plan.fluid import forest_draft
from echo2.broadcast.plan.model import SEED, Topology


def star(problem: Problem) -> Draft:
    parents = {node.node_id: SEED for node in problem.nodes}
    return forest_draft(problem, Topology.STAR, parents, dict.fromkeys(parents, whole(problem.chunks)))
