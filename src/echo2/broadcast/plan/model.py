"""The words of a dissemination plan.

Invariant: a plan is data: who gets which chunks from whom, in which order, at which planned rate. Bytes per second and
seconds throughout; a node's rate is what it can carry in all, a stream's rate what the plan gives to it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

SEED = "seed"
MOST_STRETCHES = 64
"""That a stream has: more would not be understood by its ends."""
"""Node id of the learner's side: it has every object from the start and only sends."""


class Topology(StrEnum):
    CHAIN = "chain"
    """N = floor(B_0 / r) chains, every chain carries everything; becomes a tree when B_0 is below a worker's rate."""
    TREE = "tree"
    RING = "ring"
    """Disjoint stripes, closed into a ring: the learner sends each byte once."""
    STAR = "star"
    """Everything straight from the learner: the paper's ECHO-2-NoP2P."""


class Node(msgspec.Struct, frozen=True):
    """A worker's relay as the planner sees it."""

    node_id: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    reachable: bool = True
    """Others can dial it; a node that cannot be dialled feeds nobody (field report H11)."""


class Stretch(msgspec.Struct, frozen=True):
    """``count`` chunks from ``first`` on, upwards (step 1) or downwards (step -1)."""

    first: int
    count: int
    step: int = 1

    def numbers(self) -> range:
        return range(self.first, self.first + self.count * self.step, self.step)


class Stream(msgspec.Struct, frozen=True):
    """An ordered list of chunks from one parent to one child."""

    parent: str
    """``SEED`` or a node id."""
    child: str
    stretches: tuple[Stretch, ...]
    """Planned share, in sending order. The streams of one child partition the object's chunks."""
    rate_bytes_per_s: float
    """What the plan gives to it."""
    spills: bool = True
    """When its own share is sent it may go on with whatever the child still lacks. Never in a ring from the learner."""


class Plan(msgspec.Struct, frozen=True):
    topology: Topology
    """What was built: ``chain`` may have become ``tree`` or ``star``."""
    size_bytes: int
    chunk_bytes: int
    streams: tuple[Stream, ...]
    predicted_s: dict[str, float]
    """Per node: when it has everything."""
    predicted_share_s: float
    """When the share 1/gamma of the nodes has everything."""
    predicted_all_s: float
    bound_s: float
    """No scheme serves the share 1/gamma sooner (broadcast notes §1)."""
    bound_all_s: float
    chains: tuple[tuple[str, ...], ...] = ()
    """Workers in line, heads first, where the plan has lines: what a later plan keeps to find its links warm."""
