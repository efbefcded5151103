"""Who stands in for whom when a node fails, and plans without it.

Invariant: whoever may have to turn to a node further up is named among that node's descendants; a plan that loses a
node still brings every chunk to every other node once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from echo2.broadcast.plan.model import SEED, Plan, Stream, Stretch


class Kin:
    """Who is above and below whom in a plan."""

    def __init__(self, plan: Plan) -> None:
        self._parents: dict[str, str] = {}
        self._children: dict[str, dict[str, None]] = {}
        for stream in plan.streams:
            self._children.setdefault(stream.parent, {})[stream.child] = None
            if self._parents.get(stream.child, SEED) == SEED:
                self._parents[stream.child] = stream.parent

    def ancestors(self, node_id: str) -> tuple[str, ...]:
        """Parent, its parent and so on to the seed: the order in which a node looks for another source.

        A node with several parents counts its peer as its parent; around a ring, the way ends before it comes round.
        """
        above: dict[str, None] = {}
        while (node_id := self._parents.get(node_id, SEED)) != SEED and node_id not in above:
            above[node_id] = None
        return (*above, SEED)

    def sources(self, stream: Stream) -> tuple[str, ...]:
        """The stream's parent, then its ancestors; the seed is last."""
        if stream.parent == SEED:
            return (SEED,)
        above = (node for node in self.ancestors(stream.parent) if node not in (stream.parent, stream.child))
        return (stream.parent, *above)

    def children(self, node_id: str) -> tuple[str, ...]:
        return tuple(self._children.get(node_id, ()))

    def descendants(self, node_id: str) -> tuple[str, ...]:
        """Everybody further down, children first; around a ring, that is everybody else."""
        below: dict[str, None] = {}
        waiting = [node_id]
        for parent in waiting:
            fresh = [child for child in self._children.get(parent, ()) if child not in below and child != node_id]
            below.update(dict.fromkeys(fresh))
            waiting += fresh
        return tuple(below)


def without(plan: Plan, node_id: str) -> Plan:
    """The plan when ``node_id`` is gone: what it passed on comes from those who fed it, each its own part.

    Predictions stay those of the whole plan.
    """
    feeding = [stream for stream in plan.streams if stream.child == node_id]
    streams: list[Stream] = []
    for stream in plan.streams:
        if stream.parent == node_id:
            streams += _taken_over(stream, feeding)
        elif stream.child != node_id:
            streams.append(stream)
    return msgspec.structs.replace(
        plan,
        streams=tuple(streams),
        predicted_s={node: time for node, time in plan.predicted_s.items() if node != node_id},
        chains=tuple(line for names in plan.chains if (line := tuple(name for name in names if name != node_id))),
    )


def joined(plan: Plan, stream: Stream) -> Plan:
    """The plan with one more node, fed by ``stream`` alone."""
    return msgspec.structs.replace(plan, streams=(*plan.streams, stream))


def order_at(plan: Plan, node_id: str) -> tuple[Stretch, ...]:
    """The chunks in the order in which they come to a node, so that its own child never waits."""
    return tuple(stretch for stream in plan.streams if stream.child == node_id for stretch in stream.stretches)


def _taken_over(stream: Stream, feeding: Sequence[Stream]) -> Iterator[Stream]:
    for feed in feeding:
        part = tuple(_common(stream.stretches, feed.stretches))
        if part and feed.parent != stream.child:
            rate = min(stream.rate_bytes_per_s, feed.rate_bytes_per_s)
            yield Stream(feed.parent, stream.child, part, rate, stream.spills and feed.spills)


def _common(wanted: Sequence[Stretch], had: Sequence[Stretch]) -> Iterator[Stretch]:
    """The chunks of ``wanted`` that are in ``had`` too, in the order of ``wanted``."""
    for stretch in wanted:
        low, high = _span(stretch)
        spans = sorted((max(low, span[0]), min(high, span[1])) for span in map(_span, had))
        for first, end in spans if stretch.step > 0 else reversed(spans):
            if first < end:
                yield Stretch(first if stretch.step > 0 else end - 1, end - first, stretch.step)


def _span(stretch: Stretch) -> tuple[int, int]:
    """[first, end) of its numbers, rising."""
    if stretch.step > 0:
        return stretch.first, stretch.first + stretch.count
    return stretch.first - stretch.count + 1, stretch.first + 1
