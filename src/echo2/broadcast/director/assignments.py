"""From a plan to what each node is told.

Invariant: a node is told only what changed for it, parents before their children; a feed that brings an object and
whose source is still the one that the plan means is left as it was, because changing it would interrupt it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from echo2.broadcast.plan.model import SEED, Plan, Stream
from echo2.broadcast.plan.repair import Kin
from echo2.broadcast.relay.frames import MAX_CHILDREN, MAX_SOURCES, Assign, Feed, Source


class Assignments:
    """Of one plan, through all its changes."""

    def __init__(self, manifest: bytes) -> None:
        """manifest: signed, of the object; empty for links that shall be kept warm."""
        self._manifest = manifest
        self._generation = 0
        self._told: dict[str, Assign] = {}

    def forget(self, node_id: str) -> None:
        """The node lost its part: it is told again."""
        self._told.pop(node_id, None)

    def update(
        self, plan: Plan, where: Mapping[str, Source], paces: Mapping[Stream, float] = MappingProxyType({})
    ) -> list[tuple[str, Assign]]:
        """What is news. where: the seed and every node of the plan.  paces: of streams that are not to go as fast as
        they can."""
        self._generation += 1
        kin, incoming = Kin(plan), _by_child(plan)
        news = []
        for node_id in (SEED, *kin.descendants(SEED)):
            told = self._told.get(node_id)
            before = told.feeds if told is not None else ()
            streams = incoming.get(node_id, ())
            feeds = tuple(self._feed(kin, stream, where, before, paces.get(stream, 0.0)) for stream in streams)
            children, planned = kin.descendants(node_id)[:MAX_CHILDREN], len(kin.children(node_id))
            if told is None or (told.feeds, told.children, told.planned_children) != (feeds, children, planned):
                told = self._told[node_id] = Assign(self._generation, self._manifest, feeds, children, planned)
                news.append((node_id, told))
        return news

    def _feed(self, kin: Kin, stream: Stream, where: Mapping[str, Source], told: tuple[Feed, ...], pace: float) -> Feed:
        above = [where[source] for source in kin.sources(stream)]
        sources = (*above[:-1][: MAX_SOURCES - 1], above[-1])
        if not self._manifest:
            return Feed(sources, (), 0.0, stream.spills)
        for feed in told:
            asks = next(source for source in feed.sources if where.get(source.node_id) == source)
            if (asks, feed.stretches, feed.spills) == (above[0], stream.stretches, stream.spills):
                return feed
        return Feed(sources, stream.stretches, stream.rate_bytes_per_s, stream.spills, pace)


def _by_child(plan: Plan) -> dict[str, list[Stream]]:
    """Peers first: the first feed's link is the one that is warmed."""
    incoming: dict[str, list[Stream]] = {}
    for stream in sorted(plan.streams, key=lambda stream: stream.parent == SEED):
        incoming.setdefault(stream.child, []).append(stream)
    return incoming
