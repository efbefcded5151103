"""Which wire objects exist, and which of them bring a worker to a policy.

Invariant: a path starts at nothing (an anchor) or at a policy that the worker holds, every delta in it applies to what
came before, and no other path has fewer bytes left to transfer. Pure.

    nothing ──anchor──▶ 0.0 ──delta──▶ 0.2 ──delta──▶ 0.4        an edge costs the bytes of its object still to come
       └───────────────anchor────────────────────▶─┘
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

import msgspec

from echo2.types import Policy, SnapshotKind


class Entry(msgspec.Struct, frozen=True):
    """A wire object that can be had."""

    policy: Policy
    """What it leads to."""
    kind: SnapshotKind
    base: Policy | None
    """What it applies to; None for an anchor."""
    root: str
    """Its name: blake3 of its bytes."""
    size_bytes: int
    decoded_root: str
    """What it becomes."""
    base_stays: bool = False
    """Whether later versions, too, are adapters of its base, and none is a delta of what it becomes."""


def cheapest_path(
    entries: Sequence[Entry], target: Policy, held: Collection[Policy], received: Mapping[str, int] | None = None
) -> list[Entry] | None:
    """Objects to apply in order to have ``target``; empty when it is held, None when there is no way.

    held: policies that lie decoded on the worker's disk.  received: bytes of objects, by root, that it has already.
    Among equally cheap paths the shorter one, then the one whose objects come first in ``entries``.
    """
    if target in held:
        return []
    have = received or {}
    reached: set[Policy | None] = {None, *held}
    frontier = [_one_more(entries, (), index, 0, have) for index, x in enumerate(entries) if x.base in reached]
    heapq.heapify(frontier)
    while frontier:
        cost, _, path = heapq.heappop(frontier)
        place = entries[path[-1]].policy
        if place == target:
            return [entries[index] for index in path]
        if place not in reached:
            reached.add(place)
            for index, entry in enumerate(entries):
                if entry.base == place:
                    heapq.heappush(frontier, _one_more(entries, path, index, cost, have))
    return None


def _one_more(
    entries: Sequence[Entry], path: tuple[int, ...], index: int, cost: int, have: Mapping[str, int]
) -> tuple[int, int, tuple[int, ...]]:
    """The path with one more entry, in the order of preference."""
    entry = entries[index]
    missing = max(entry.size_bytes - have.get(entry.root, 0), 0)
    return cost + missing, len(path) + 1, (*path, index)


def anchor_due(entries: Sequence[Entry], policy: Policy, anchor_every: int) -> bool:
    """Whether ``policy`` needs an anchor of its own, given what exists, the delta to it included.

    It does when nobody can get there from nothing, when a joiner would apply ``anchor_every`` deltas or more, or when
    those deltas together are as large as the anchor before them. Never a second one, even where its anchor turned out
    larger than the way that was there before, nor beside adapters: whoever took it would need their base for the next.
    """
    if any(entry.base is None and entry.policy == policy for entry in entries):
        return False
    path = cheapest_path(entries, policy, ())
    if path is None:
        return True
    anchor, *deltas = path
    if path[-1].base_stays:
        return False
    return len(deltas) >= anchor_every or sum(x.size_bytes for x in deltas) >= anchor.size_bytes


def kept_entries(entries: Sequence[Entry], kept: Collection[Policy]) -> list[Entry]:
    """What must stay on disk: the newest anchor, the deltas after it, and the way from nothing to each kept policy.

    Of adapters of one base the newest do: nothing is built on the others.
    """
    anchors = [entry for entry in entries if entry.base is None]
    newest = max(anchors, key=lambda entry: entry.policy, default=None)
    roots = {newest.root} if newest is not None else set()
    last = max((x.policy for x in entries), default=None)
    after = [x for x in entries if x.base is not None and (newest is None or x.policy > newest.policy)]
    roots |= {x.root for x in after if not x.base_stays or x.policy == last}
    for policy in kept:
        roots |= {entry.root for entry in cheapest_path(entries, policy, ()) or ()}
    return [entry for entry in entries if entry.root in roots]
