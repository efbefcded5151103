"""Chain and direct: for workers that upload slower than they download, as on cable and ADSL lines.

Invariant: every worker gets the front of the object along its chain, at the chain's upload rate, and the back straight
from the learner, which spends all that the heads leave of its uplink on it; so everybody is done at the same time and
r = (B_0 + (W − N)·u)/W, within u·N/W of the bound. A head takes both parts from the learner, as two streams, so that a
fair division of the uplink among streams gives it as much as the others get from two parents.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from echo2.broadcast.plan.draft import Draft, Problem
from echo2.broadcast.plan.lines import stand
from echo2.broadcast.plan.model import SEED, Node, Stream, Stretch, Topology

WORTH_DIRECT = 0.02
"""A direct stream below this share of a worker's rate is left out."""
SETTLED = 1.03
"""The number of chains that stood before is kept while no other is quicker by this factor."""


def hybrid(problem: Problem) -> Draft | None:
    """The number of chains that is soonest done; None when the uplink does not even feed one head."""
    most = len(problem.reachable)
    drafts = {count: _divide(problem, count) for count in {1 << k for k in range(most.bit_length())} if count <= most}
    times = {count: draft.share_s(problem.share) for count, draft in sorted(drafts.items()) if draft is not None}
    if not times:
        return None
    best = min(times, key=lambda count: times[count])
    settled = len(problem.previous)
    return drafts[settled if times.get(settled, float("inf")) <= SETTLED * times[best] else best]


class _Place(NamedTuple):
    """A worker in its chain."""

    node: Node
    parent: str
    rate: float
    """Along the chain; 0 for a worker that hangs on the learner alone."""
    start_s: float
    """When its first chunk sets out from the parent, arrives and so on: bytes along the chain count from here."""


def _divide(problem: Problem, count: int) -> Draft | None:
    lines, direct = stand(problem, count)
    places = [place for line in lines for place in _along(problem, line)]
    places += [_Place(node, SEED, 0.0, 0.0) for node in direct]
    spare = problem.uplink_bytes_per_s - sum(place.rate for place in places if place.parent == SEED)
    if spare <= 0:
        return None
    done_s = _finish_s(problem, places, spare)
    streams: list[Stream] = []
    finish_s: dict[str, float] = {}
    for place in places:
        split, finish_s[place.node.node_id] = _split(problem, place, _direct_rate(problem, place, done_s))
        streams += split
    chains = (*(tuple(node.node_id for node in line) for line in lines), *((node.node_id,) for node in direct))
    return Draft(Topology.CHAIN, tuple(streams), finish_s, chains)


def _along(problem: Problem, line: list[Node]) -> list[_Place]:
    """The best is in front: what a head can send is what the chain carries from there on."""
    places: list[_Place] = []
    parent, carries, start_s = SEED, line[0].up_bytes_per_s, problem.latency_s
    for node in line:
        rate = min(carries, node.down_bytes_per_s)
        places.append(_Place(node, parent, rate, start_s))
        start_s += problem.hop_s(rate)
        parent, carries = node.node_id, min(rate, node.up_bytes_per_s)
    return places


def _direct_rate(problem: Problem, place: _Place, done_s: float) -> float:
    """What a worker needs from the learner to be done at ``done_s``, as far as it can receive so much."""
    missing = problem.size_bytes - place.rate * max(done_s - place.start_s, 0.0)
    needed = missing / max(done_s - problem.latency_s, 1e-9)
    return min(max(needed, 0.0), place.node.down_bytes_per_s - place.rate)


def _finish_s(problem: Problem, places: list[_Place], spare: float) -> float:
    """When all are done whom their own download does not hold up: the least time that ``spare`` suffices for."""

    # As ``_direct_rate``, for all at once: this is asked some forty times for every number of chains.
    rates = np.array([place.rate for place in places])
    starts_s = np.array([place.start_s for place in places])
    room = np.array([place.node.down_bytes_per_s for place in places]) - rates

    def suffices(done_s: float) -> bool:
        missing = problem.size_bytes - rates * np.maximum(done_s - starts_s, 0.0)
        needed = missing / max(done_s - problem.latency_s, 1e-9)
        return bool(np.minimum(np.maximum(needed, 0.0), room).sum() <= spare)

    late = problem.size_bytes / problem.uplink_bytes_per_s + problem.latency_s
    while not suffices(late):
        late *= 2
    early = problem.latency_s
    for _ in range(30):
        middle = (early + late) / 2
        early, late = (early, middle) if suffices(middle) else (middle, late)
    return late


def _split(problem: Problem, place: _Place, direct: float) -> tuple[list[Stream], float]:
    """A worker's streams, and when it is done."""
    if direct < WORTH_DIRECT * place.rate:
        direct = 0.0
    node, along, chunks = place.node.node_id, place.rate, problem.chunks
    done_s = (problem.size_bytes + along * place.start_s + direct * problem.latency_s) / (along + direct)
    front = min(max(round(along * (done_s - place.start_s) / problem.chunk_bytes), 0), chunks) if direct else chunks
    streams = [
        Stream(place.parent, node, (Stretch(0, front),), along),
        Stream(SEED, node, (Stretch(chunks - 1, chunks - front, -1),), direct),
    ]
    return [stream for stream in streams if stream.stretches[0].count], done_s
