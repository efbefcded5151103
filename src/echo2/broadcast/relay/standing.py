"""Links that are kept between versions, so that the next one meets warm connections.

Invariant: we stay connected to the seed, to those of whom the newest standing plan says that they will feed us, and to
whoever feeds us now; to nobody else. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay.frames import Assign, Warm
from echo2.broadcast.relay.links import Link, Links

WARM_BYTES = 16 * 1024 * 1024
"""More than a second of 100 Mbit/s; a fast link has them sooner and is warm as well."""
STANDBY_SOURCES = 2
"""Of each feed: parent and grandparent stay connected between versions."""
STANDBY_WARM_BYTES = 2 * 1024 * 1024
"""For the grandparent's link: it shall start at full speed when the parent fails; nothing is measured by it."""


class Standing:
    def __init__(self, links: Links, lanes: int) -> None:
        """lanes: connections per feed."""
        self._links = links
        self._lanes = lanes
        self._plan: Assign | None = None
        self._kept: set[tuple[str, int]] = set()
        """Peers and lanes of the plan."""

    def forget(self) -> None:
        """A seed that started again counts its plans from the beginning."""
        self._plan = None

    def take(self, plan: Assign, busy: Collection[str], now: float) -> None:
        """busy: peers that feed us now."""
        if self._plan is not None and plan.generation < self._plan.generation:
            return
        self._plan = plan
        self._kept = set()
        for place, feed in enumerate(plan.feeds):
            for source in feed.sources[:STANDBY_SOURCES]:
                for lane in range(place * self._lanes, (place + 1) * self._lanes):
                    self._kept.add((source.node_id, lane))
                    self._links.dial(source, lane)
        for link in self._links.dialled():
            if link.peer != SEED and link.peer not in busy and (link.peer, link.lane) not in self._kept:
                self._links.hang_up(link, "no longer in the plan")
            else:
                self.warm(link, now)

    def warm(self, link: Link, now: float) -> None:
        """Let the link find out its rate, once; for longer when it is measured."""
        measured = link.peer in (SEED, self._first_parent)
        if link.lane or not (measured or (link.peer, 0) in self._kept):
            return
        if measured and not link.measured:
            link.measured = True
            self._ask(link, WARM_BYTES, now)
        elif link.warmed_s < 0:
            self._ask(link, STANDBY_WARM_BYTES, now)

    def _ask(self, link: Link, nbytes: int, now: float) -> None:
        link.warmed_s = now
        self._links.say(link, Warm(nbytes))

    @property
    def _first_parent(self) -> str:
        feeds = self._plan.feeds if self._plan is not None else ()
        return feeds[0].sources[0].node_id if feeds and feeds[0].sources else ""
