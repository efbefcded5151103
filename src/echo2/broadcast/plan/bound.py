"""What no scheme can beat.

Invariant: every way to bring an object to the workers takes at least ``lower_bound_s``, because the learner sends every
byte once, a worker receives every byte once, and all uplinks together carry all copies (Kumar and Ross, HotWeb 2006).
"""

from __future__ import annotations

import math
from collections.abc import Collection

from echo2.broadcast.plan.model import Node


def quick_count(nodes: int, share: float) -> int:
    """m: how many of so many nodes make up ``share`` of them, rounded up. 16 nodes and a share of 1/1.1 make 15."""
    return min(nodes, max(1, math.ceil(nodes * share - 1e-9))) if nodes else 0


def lower_bound_s(size_bytes: int, uplink_bytes_per_s: float, nodes: Collection[Node], share: float = 1.0) -> float:
    """max{ G/B_0 , G/d_(m) , m·G/(B_0 + Σu) }: seconds before which no ``share`` of the nodes can have everything.

    G is the size, B_0 the learner's uplink, m the nodes of the share, d_(m) the m-th largest download rate, u an upload
    rate. 0 without nodes.
    """
    if not nodes:
        return 0.0
    quick = quick_count(len(nodes), share)
    downs = sorted((node.down_bytes_per_s for node in nodes), reverse=True)
    sending = uplink_bytes_per_s + math.fsum(node.up_bytes_per_s for node in nodes)
    return size_bytes / min(uplink_bytes_per_s, downs[quick - 1], sending / quick)
