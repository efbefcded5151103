"""Who feeds a node that comes when the others are under way.

Invariant: the learner's uplink is spent on a late comer only when no peer would feed it nearly as fast. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from echo2.broadcast.plan.model import SEED, Node

NEARLY = 0.8


class Candidate(msgspec.Struct, frozen=True):
    """Somebody who has the object or is getting it; the seed is always one."""

    node_id: str
    rate_bytes_per_s: float
    """What it could give to one child more."""
    children: int
    """Whom it feeds already."""
    whole: bool
    """It has everything already."""


def best_parent(node: Node, candidates: Sequence[Candidate]) -> Candidate:
    """Of those that feed it nearly as fast as any: a peer, an idle one, one that has everything already."""

    def gives(candidate: Candidate) -> float:
        return min(candidate.rate_bytes_per_s, node.down_bytes_per_s)

    def preference(candidate: Candidate) -> tuple[bool, bool, bool, float, str]:
        busy = candidate.children > 0
        return candidate.node_id == SEED, busy, not candidate.whole, -gives(candidate), candidate.node_id

    best = max(map(gives, candidates))
    return min((x for x in candidates if gives(x) >= NEARLY * best), key=preference)
