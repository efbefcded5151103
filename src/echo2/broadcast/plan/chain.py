"""Chains: every line of workers carries the whole object, each worker receives one stream and sends one.

Invariant: T = G/r + (depth − 1)·τ, which is within the pipeline's delay of the bound when workers upload as fast as
they download. Chain j starts at stripe j, so that chains hold different chunks early and can help each other.
"""

from __future__ import annotations

from itertools import pairwise

from echo2.broadcast.plan.draft import Draft, Problem, whole
from echo2.broadcast.plan.fluid import forest_draft
from echo2.broadcast.plan.lines import line_count, stand
from echo2.broadcast.plan.model import SEED, Topology


def chain(problem: Problem) -> Draft:
    lines, direct = stand(problem, line_count(problem))
    chains = (*(tuple(node.node_id for node in line) for line in lines), *((node.node_id,) for node in direct))
    parents = {child: parent for names in chains for parent, child in pairwise((SEED, *names))}
    orders = {
        name: whole(problem.chunks, problem.chunks * index // len(chains))
        for index, names in enumerate(chains)
        for name in names
    }
    return forest_draft(problem, Topology.CHAIN, parents, orders, chains)
