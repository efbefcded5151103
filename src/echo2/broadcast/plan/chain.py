"""Chains: every line of workers carries the whole object, each worker receives one stream and sends one.

Invariant: T = G/r + (depth − 1)·τ at full rate, which is within the pipeline's delay of the bound when workers upload
as fast as they download. Chain j starts at stripe j: chains hold different chunks early and can help each other.

As many chains as the uplink feeds; fewer, if those are done in no time as well: every chain less is one copy less that
the learner's side sends.
"""

from __future__ import annotations

from itertools import pairwise

from echo2.broadcast.plan.draft import Draft, Problem, whole
from echo2.broadcast.plan.fluid import forest_draft
from echo2.broadcast.plan.lines import line_count, stand
from echo2.broadcast.plan.model import SEED, Topology

SOON_S = 0.5
"""What is done by then need not be done sooner."""


def chain(problem: Problem) -> Draft:
    """As many chains as the uplink feeds."""
    return _draft(problem, line_count(problem))


def thrifty(problem: Problem, fastest: Draft) -> Draft:
    """The fewest chains that are done soon, else ``fastest``."""
    count = 1
    while count < min(len(fastest.chains), len(problem.reachable)):  # the seed's single nodes are chains too
        fewer = _draft(problem, count)
        if fewer.share_s(problem.share) <= SOON_S:
            return fewer
        count *= 2
    return fastest


def _draft(problem: Problem, count: int) -> Draft:
    lines, direct = stand(problem, count)
    chains = (*(tuple(node.node_id for node in line) for line in lines), *((node.node_id,) for node in direct))
    parents = {child: parent for names in chains for parent, child in pairwise((SEED, *names))}
    orders = {
        name: whole(problem.chunks, problem.chunks * index // len(chains))
        for index, names in enumerate(chains)
        for name in names
    }
    return forest_draft(problem, Topology.CHAIN, parents, orders, chains)
