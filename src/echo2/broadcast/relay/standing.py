"""Links that are kept between versions, so that the next one meets warm connections.

Invariant: we stay connected to the seed, to those of whom the newest standing plan says that they will feed us, and to
whoever feeds us now; to nobody else. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay.frames import Assign, Source, Warm
from echo2.broadcast.relay.links import WARM_S, Link, Links

WARM_BYTES = 16 * 1024 * 1024
"""More than a second of 100 Mbit/s; a fast link has them sooner and is warm as well."""
STANDBY_SOURCES = 2
"""Of each feed: parent and grandparent stay connected between versions."""
MOST_WARMING_S = WARM_S + 0.5
"""Then the next one has its turn."""
STANDBY_WARM_BYTES = 2 * 1024 * 1024
"""For the grandparent's link: it shall start at full speed when the parent fails; nothing is measured by it."""


class Standing:
    def __init__(self, links: Links, lanes: int) -> None:
        """lanes: connections per feed."""
        self._links = links
        self._lanes = lanes
        self._plan: Assign | None = None
        self._kept: dict[tuple[str, int], Source] = {}
        """By peer and lane, those of the plan."""
        self._due: list[tuple[Link, int]] = []
        """Links to be warmed and with how many bytes, in order."""
        self._warming: tuple[Link, int, float] | None = None
        """The one that is, until it has received so many bytes, or until then."""

    def forget(self) -> None:
        """A seed that started again counts its plans from the beginning."""
        self._plan = None

    def take(self, plan: Assign, busy: Collection[str], now: float) -> None:
        """busy: peers that feed us now."""
        if self._plan is not None and plan.generation < self._plan.generation:
            return
        self._plan = plan
        self._kept = {}
        for place, feed in enumerate(plan.feeds):
            for source in feed.sources[:STANDBY_SOURCES]:
                for lane in range(place * self._lanes, (place + 1) * self._lanes):
                    self._kept[source.node_id, lane] = source
                    self._links.dial(source, lane)
        for link in self._links.dialled():
            if link.peer != SEED and link.peer not in busy and (link.peer, link.lane) not in self._kept:
                self._links.hang_up(link, "no longer in the plan")
            else:
                self.warm(link, now)

    def keep(self, unreachable: Collection[str]) -> None:
        """Dial those again whose connection was lost or did not come about."""
        for (peer, lane), source in self._kept.items():
            if peer not in unreachable:
                self._links.dial(source, lane)

    def warm(self, link: Link, now: float) -> None:
        """Let the link find out its rate, once and when its turn comes; for longer when it is measured."""
        measured = link.peer in (SEED, self._first_parent)
        if link.lane or not (measured or (link.peer, 0) in self._kept):
            return
        if measured and not link.measured:
            link.measured = True
            self._due.append((link, WARM_BYTES))
        elif link.warmed_s < 0:
            self._due.append((link, STANDBY_WARM_BYTES))
        link.warmed_s = now
        self.tick(now)

    def tick(self, now: float) -> None:
        """One link at a time: two would share our line, and both look slow."""
        if self._warming is not None:
            link, enough, until_s = self._warming
            if link.received_bytes < enough and now < until_s and self._links.get(link.number) is link:
                return
            self._warming = None
        while self._due and self._warming is None:
            link, nbytes = self._due.pop(0)
            if self._links.get(link.number) is link:
                self._warming = link, link.received_bytes + nbytes, now + MOST_WARMING_S
                self._links.say(link, Warm(nbytes))

    @property
    def _first_parent(self) -> str:
        feeds = self._plan.feeds if self._plan is not None else ()
        return feeds[0].sources[0].node_id if feeds and feeds[0].sources else ""
