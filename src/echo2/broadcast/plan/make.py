"""From measured rates to a plan: the one door to the planner.

Invariant (I10): the same fleet gives the same plan, in whatever order it is given; no plan asks anybody for more than
it can carry; and no predicted time is below the bound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from echo2.broadcast.plan.bound import lower_bound_s
from echo2.broadcast.plan.chain import chain, thrifty
from echo2.broadcast.plan.draft import MEASURING_SLACK, Draft, Problem, in_order
from echo2.broadcast.plan.hybrid import hybrid
from echo2.broadcast.plan.model import Node, Plan, Topology
from echo2.broadcast.plan.ring import ring
from echo2.broadcast.plan.star import star
from echo2.broadcast.plan.tree import tree

LEAST_RATE = 1.0
"""Bytes per second: a node of no rate at all is never done, and arithmetic goes on."""
WORTH_DIVIDING = 0.9
"""A plan of two streams per worker must be done in this share of the simple plan's time."""


def make_plan(
    topology: Topology,
    nodes: Collection[Node],
    uplink_bytes_per_s: float,
    size_bytes: int,
    chunk_bytes: int,
    latency_s: float,
    gamma: float,
    previous: Sequence[Sequence[str]] = (),
) -> Plan:
    """Who gets which chunks from whom, and when everybody is done.

    nodes: all that shall have the object.  uplink_bytes_per_s: B_0 of the learner's side.  latency_s: one way.
    gamma: the share 1/gamma of the nodes counts.  previous: the ``chains`` of the plan before, kept where that costs
    nothing.
    """
    able = [
        msgspec.structs.replace(
            node,
            up_bytes_per_s=max(node.up_bytes_per_s, LEAST_RATE),
            down_bytes_per_s=max(node.down_bytes_per_s, LEAST_RATE),
        )
        for node in nodes
    ]
    problem = Problem(
        in_order(able), max(uplink_bytes_per_s, LEAST_RATE), size_bytes, chunk_bytes, latency_s, 1 / gamma,
        tuple(map(tuple, previous)),
    )  # fmt: skip
    draft = _draft(topology, problem)
    return Plan(
        topology=draft.topology,
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        streams=draft.streams,
        predicted_s=draft.finish_s,
        predicted_share_s=draft.share_s(problem.share),
        predicted_all_s=draft.share_s(1.0),
        bound_s=problem.bound_s,
        bound_all_s=lower_bound_s(size_bytes, problem.uplink_bytes_per_s, problem.nodes),
        chains=draft.chains,
    )


def _draft(topology: Topology, problem: Problem) -> Draft:
    if topology is Topology.STAR or not problem.reachable:
        return star(problem)
    if topology is Topology.RING:
        return ring(problem)
    if topology is Topology.TREE or problem.uplink_bytes_per_s * (1 + MEASURING_SLACK) < problem.rate:
        return tree(problem)
    simple = chain(problem)
    enough_s = WORTH_DIVIDING * simple.share_s(problem.share)
    divided = hybrid(problem) if enough_s > problem.bound_s else None
    if divided is not None and divided.share_s(problem.share) < enough_s:
        return divided
    return thrifty(problem, simple)
