"""Rates and times of a forest: every node is fed by one parent, and bytes flow like water.

Invariant: no node receives faster than its parent does, children share what their parent can send, and nobody carries
more than it can. So what is predicted can be reached; chunks cost one hop's delay per relay and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo2.broadcast.plan.draft import Draft, Problem
from echo2.broadcast.plan.model import SEED, Stream, Stretch, Topology


def fair_shares(capacity: float, demands: Sequence[float]) -> list[float]:
    """Max-min fair: nobody gets more than it demands, and what one leaves the others have."""
    shares = [0.0] * len(demands)
    rising = sorted(range(len(demands)), key=demands.__getitem__)
    for rank, index in enumerate(rising):
        shares[index] = min(demands[index], capacity / (len(demands) - rank))
        capacity -= shares[index]
    return shares


def forest_rates(problem: Problem, parents: Mapping[str, str]) -> dict[str, float]:
    """Bytes per second into each node. parents: child → parent, every parent before its children."""
    nodes = {node.node_id: node for node in problem.nodes}
    children: dict[str, list[str]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    rates = {SEED: problem.uplink_bytes_per_s}
    for parent in (SEED, *parents):
        sends = problem.uplink_bytes_per_s if parent == SEED else nodes[parent].up_bytes_per_s
        fed = children.get(parent, [])
        demands = [min(nodes[child].down_bytes_per_s, rates[parent]) for child in fed]
        rates.update(zip(fed, fair_shares(sends, demands), strict=True))
    del rates[SEED]
    return rates


def forest_times(problem: Problem, parents: Mapping[str, str], rates: Mapping[str, float]) -> dict[str, float]:
    """G/r + l at the seed's children; each relay further down adds the τ of the link that feeds it."""
    starts = {SEED: 0.0}
    for child, parent in parents.items():
        starts[child] = starts[parent] + (problem.hop_s(rates[parent]) if parent != SEED else 0.0)
    return {child: starts[child] + problem.size_bytes / rates[child] + problem.latency_s for child in parents}


def forest_draft(
    problem: Problem,
    topology: Topology,
    parents: Mapping[str, str],
    orders: Mapping[str, tuple[Stretch, ...]],
    chains: tuple[tuple[str, ...], ...] = (),
) -> Draft:
    """orders: in which order each node gets the chunks."""
    rates = forest_rates(problem, parents)
    streams = tuple(Stream(parent, child, orders[child], rates[child]) for child, parent in parents.items())
    return Draft(topology, streams, forest_times(problem, parents, rates), chains)
