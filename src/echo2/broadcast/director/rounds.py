"""What one transfer, or one time of warming links, says of the nodes that took part.

Invariant: a flow proves that both its ends can carry it, and no more. It speaks against an end only when it fell short
of what its sender had to give, and then against that end whose other flows fell short too. Pure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import median

import msgspec

from echo2.broadcast.plan.model import SEED

SHORT = 0.75
"""A flow below this share of what it should have been fell short."""

Link = tuple[str, str]
"""Sender, receiver."""


class Evidence(msgspec.Struct):
    """What one round says of one direction of one node: sums over its flows."""

    rate: float = 0.0
    planned: float = 0.0
    promised: float = 0.0
    """Planned, as far as the senders had it to give."""
    from_peers: bool = False
    below_usual: bool = False

    @property
    def fell_short(self) -> bool:
        return self.rate < SHORT * self.promised

    @property
    def below_plan(self) -> bool:
        return self.rate < SHORT * self.planned

    @property
    def tells(self) -> bool:
        """Something of a node of which nothing is known. Who was planned to get or give little is not known to be slow,
        and a seed that is held up gives everybody less."""
        return self.fell_short or (self.from_peers and not self.below_plan and not self.below_usual)


class Round:
    """One transfer, or one time of warming links."""

    def __init__(
        self,
        planned: Mapping[Link, float],
        relayed: bool,
        held: bool = False,
        usual: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """relayed: senders pass on what they get.  held: no faster than planned.  usual: rates up and down of others, 0
        for unknown."""
        self._planned = planned
        self.relayed = relayed
        self.held = held
        self._usual_up, self._usual_down = usual
        self._flows: dict[Link, float] = {}
        self.from_seed: dict[str, float] = {}
        self.egress = 0.0
        self._judged: tuple[dict[str, Evidence], dict[str, Evidence]] | None = None

    def expects(self, parent: str, child: str) -> bool:
        return parent == SEED or (parent, child) in self._planned

    def saw(self, parent: str, child: str, rate: float) -> None:
        self._judged = None
        if parent == SEED:
            self.from_seed[child] = max(rate, self.from_seed.get(child, 0.0))
        if (parent, child) in self._planned:
            self._flows[parent, child] = max(rate, self._flows.get((parent, child), 0.0))

    def evidence(self) -> tuple[dict[str, Evidence], dict[str, Evidence]]:
        """Of what nodes receive, and of what they send."""
        if self._judged is None:
            self._judged = self._judge()
        return self._judged

    def _judge(self) -> tuple[dict[str, Evidence], dict[str, Evidence]]:
        receives: dict[str, Evidence] = {}
        sends: dict[str, Evidence] = {}
        guilt = self._guilt()
        had: defaultdict[str, float] = defaultdict(float)
        for (_, child), rate in self._flows.items():
            had[child] += rate
        from_seed = median(self.from_seed.values()) if self.from_seed else 0.0
        for (parent, child), rate in self._flows.items():
            gives = from_seed if parent == SEED else had[parent] if self.relayed and had[parent] else math.inf
            promised = min(self._planned[parent, child], gives)
            short = rate < SHORT * promised and parent != SEED
            if not (short and guilt[child] < guilt[parent]):
                _add(receives, child, rate, self._planned[parent, child], promised, parent != SEED, self._usual_down)
            if parent != SEED and not (short and guilt[parent] < guilt[child]):
                _add(sends, parent, rate, self._planned[parent, child], promised, True, self._usual_up)
        return receives, sends

    def _guilt(self) -> dict[str, float]:
        """Which share of a node's flows with peers is far below the usual."""
        peers = {link: rate for link, rate in self._flows.items() if link[0] != SEED}
        usual = median(peers.values()) if peers else 0.0
        flows = Counter(node for link in peers for node in link)
        slow = Counter(node for link, rate in peers.items() if rate < SHORT * usual for node in link)
        return {node: slow[node] / count for node, count in flows.items()}


def _add(
    table: dict[str, Evidence],
    node_id: str,
    rate: float,
    planned: float,
    promised: float,
    from_peer: bool,
    usual: float,
) -> None:
    evidence = table.setdefault(node_id, Evidence())
    evidence.rate += rate
    evidence.planned += planned
    evidence.promised += promised
    evidence.from_peers |= from_peer
    evidence.below_usual = evidence.rate < SHORT * usual
