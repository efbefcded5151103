"""What a topology is asked, and what it answers.

Invariant: nodes come in one order, whatever order they were given in: reachable ones first, then by falling rate, then
by name. So the same fleet always gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from echo2.broadcast.plan.bound import lower_bound_s, quick_count
from echo2.broadcast.plan.model import Node, Stream, Stretch, Topology

MEASURING_SLACK = 0.03
"""An uplink measured this much too low still feeds the next chain: a ratio of 7.9 is 8."""


class Problem(msgspec.Struct, frozen=True):
    nodes: tuple[Node, ...]
    """In the module's order; every rate above 0."""
    uplink_bytes_per_s: float
    """B_0"""
    size_bytes: int
    """G"""
    chunk_bytes: int
    latency_s: float
    """One way, of every link."""
    share: float
    """1/gamma: the share of the nodes whose time counts."""
    previous: tuple[tuple[str, ...], ...] = ()
    """Chains whose links are warm."""

    @property
    def chunks(self) -> int:
        return math.ceil(self.size_bytes / self.chunk_bytes)

    @property
    def reachable(self) -> list[Node]:
        return [node for node in self.nodes if node.reachable]

    @property
    def unreachable(self) -> list[Node]:
        return [node for node in self.nodes if not node.reachable]

    @property
    def rate(self) -> float:
        """r: what a quarter of the reachable nodes can relay, since short transfers rather show too little than too
        much. Infinite when nobody can be reached."""
        rates = sorted((relay_rate(node) for node in self.reachable), reverse=True)
        return rates[(len(rates) - 1) // 4] if rates else math.inf

    @property
    def bound_s(self) -> float:
        return lower_bound_s(self.size_bytes, self.uplink_bytes_per_s, self.nodes, self.share)

    def hop_s(self, rate: float) -> float:
        """τ: how much later than its parent a node gets a chunk."""
        return min(self.chunk_bytes, self.size_bytes) / rate + self.latency_s


class Draft(NamedTuple):
    topology: Topology
    streams: tuple[Stream, ...]
    finish_s: dict[str, float]
    """Per node: when it has everything."""
    chains: tuple[tuple[str, ...], ...] = ()

    def share_s(self, share: float) -> float:
        times = sorted(self.finish_s.values())
        return times[quick_count(len(times), share) - 1] if times else 0.0


def relay_rate(node: Node) -> float:
    """What it can receive and send on at once."""
    return min(node.up_bytes_per_s, node.down_bytes_per_s)


def in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    def place(node: Node) -> tuple[bool, float, str]:
        rate = relay_rate(node) if node.reachable else node.down_bytes_per_s
        return not node.reachable, -rate, node.node_id

    return tuple(sorted(nodes, key=place))


def whole(chunks: int, first: int = 0) -> tuple[Stretch, ...]:
    """All chunks, from ``first`` on and around."""
    return tuple(x for x in (Stretch(first, chunks - first), Stretch(0, first)) if x.count)
