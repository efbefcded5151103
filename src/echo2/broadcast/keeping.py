"""Which wire objects must stay on the shelf.

Invariant: whoever was told a way may walk it to its end, however slow its line, and whoever runs a version that counts
may go on from it by deltas; beyond that nothing older than the newest anchor is kept. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from echo2.broadcast.catalogue import Entry, cheapest_path, kept_entries
from echo2.types import Policy


def needed_roots(
    entries: Sequence[Entry], kept: Collection[Policy], held: Collection[Policy], under_way: Collection[str]
) -> set[str]:
    """Roots of the objects to keep.

    kept: policies that somebody may still ask for.  held: policies that workers go on from.  under_way: roots of
    objects that workers bring now; from what they become, too, there is to be a way on.
    """
    newest = max((entry.policy for entry in entries), default=None)
    brought = [entry for entry in entries if entry.root in under_way]
    roots = {entry.root for entry in (*kept_entries(entries, kept), *brought)}
    if newest is not None:
        for start in {*kept, *held, *(entry.policy for entry in brought)}:
            roots |= {entry.root for entry in cheapest_path(entries, newest, (start,)) or ()}
    return roots
