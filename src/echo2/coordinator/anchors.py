"""Anchors made beside the run.

Invariant: a publish never waits for the anchor that comes due with it; a newcomer waits no longer than until the next
one is encoded. A failure leaves the older anchor in force and is tried again.
"""

from __future__ import annotations

from echo2.broadcast.catalogue import anchor_due
from echo2.coordinator.hall import Hall
from echo2.errors import DiskFull, IntegrityError
from echo2.transport.messages import MAX_WAIT_S
from echo2.types import Policy


async def keep_anchors(hall: Hall) -> None:
    """Consumes publishes; waits for one after which an anchor is due; unblocked by a publish; produces anchors."""
    while True:
        current = hall.books.state.current
        due = current is not None and anchor_due(hall.shelf.catalogue(), current, hall.config.broadcast.anchor_every)
        if not (due and current is not None and await _anchored(hall, current)):
            await hall.anchors.wait(MAX_WAIT_S)


async def _anchored(hall: Hall, policy: Policy) -> bool:
    try:
        root = await hall.shelf.add_anchor(policy)
    except (DiskFull, IntegrityError) as error:
        hall.events.emit("anchor_failed", policy=str(policy), error=str(error))
        return False
    if root is None:
        return False
    hall.events.emit("anchored", policy=str(policy))
    await hall.spread(root)
    await hall.prune()
    return True
