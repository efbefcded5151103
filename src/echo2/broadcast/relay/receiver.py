"""The child's side of a relay: objects that come, and from whom.

Invariant: a chunk is in ``here`` only after the shell said that it was verified and stored; a feed whose source fails
turns to its next one; chunks that are here are not asked for again (field report E09). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay.accusations import Accusations
from echo2.broadcast.relay.control import Announced, Stuck, Whole
from echo2.broadcast.relay.frames import Assign, Feed, Halt, Have, Want
from echo2.broadcast.relay.intake import STUCK_S, FeedState, Intake
from echo2.broadcast.relay.links import CloseFile, Link, Links, OpenFile, Say
from echo2.broadcast.relay.serving import pack_flags
from echo2.broadcast.relay.unreachable import Unreachable

KEPT_OBJECTS = 8
"""Whole objects that nobody here asked for, kept for others."""


class Receiver:
    def __init__(self, links: Links, lanes: int, is_seed: bool, first_stream: int, unreachable: Unreachable) -> None:
        """lanes: connections per feed.  first_stream: below 2**31, and another one in each life of the node."""
        self._links = links
        self._lanes = lanes
        self._is_seed = is_seed
        self._intakes: dict[str, Intake] = {}
        self._streams = first_stream
        self._accusations = Accusations()
        self._unreachable = unreachable
        self.received_bytes = 0
        self._sent_by: Counter[str] = Counter()
        """Bytes of chunks, by peer."""
        self.reparentings = 0

    def get(self, root: str | None) -> Intake | None:
        return self._intakes.get(root) if root is not None else None

    def __iter__(self) -> Iterator[Intake]:
        return iter(list(self._intakes.values()))

    # ---- objects -----------------------------------------------------------------------------------------------

    def publish(self, manifest: Manifest, now: float) -> Intake:
        """The seed's: whole from the start."""
        intake = self._intake(manifest, now)
        intake.opened(bytearray(b"\x01") * intake.count)
        return intake

    def bring(self, manifest: Manifest, now: float) -> None:
        intake = self._intake(manifest, now)
        intake.needed, intake.gained_s = True, now
        if intake.whole:
            self._links.do(Say(Whole(intake.root, "")))
        elif not intake.open or intake.stuck:
            self._open_file(intake)

    def withdraw(self, root: str) -> None:
        intake = self._intakes.pop(root, None)
        if intake is not None:
            for feed in intake.feeds:
                self._halt(feed)
            self._links.do(CloseFile(root))

    def opened(self, root: str, here: bytearray, now: float) -> Intake | None:
        """The object's file is open and holds these chunks."""
        intake = self._intakes.get(root)
        if intake is None:
            self._links.do(CloseFile(root))
            return None
        intake.opened(here)
        intake.gained_s = now
        if intake.whole:
            self._finish(intake)
        for feed in intake.feeds:
            self._ask(intake, feed, now)
        return intake

    def failed(self, root: str, why: str) -> None:
        """The object's file cannot be made or written, for want of room perhaps."""
        intake = self._intakes.get(root)
        if intake is None:
            return
        self.withdraw(root)
        self._links.event("relay_file_failed", root=root[:16], why=why)
        if intake.needed:
            self._links.do(Say(Stuck(root, "", why)))

    def assign(self, frame: Assign, manifest: Manifest, now: float) -> None:
        """Our part in the object's plan."""
        known = manifest.object_root in self._intakes
        intake = self._intake(manifest, now)
        if not known:
            self._links.do(Say(Announced(intake.root, manifest.policy, manifest.object_size)))
            self._open_file(intake)
        if frame.generation < intake.generation:
            return
        intake.generation = frame.generation
        intake.children, intake.planned_children = frozenset(frame.children), frame.planned_children
        self._take_feeds(intake, frame.feeds, now)

    def _open_file(self, intake: Intake) -> None:
        if not intake.opening:
            intake.opening, intake.stuck = True, False
            self._links.do(OpenFile(intake.manifest))

    def forget_generations(self) -> None:
        """A seed that started again counts its plans from the beginning."""
        for intake in self._intakes.values():
            intake.generation = -1

    def _intake(self, manifest: Manifest, now: float) -> Intake:
        intake = self._intakes.get(manifest.object_root)
        if intake is None:
            intake = self._intakes[manifest.object_root] = Intake(manifest, now, self._streams)
            unasked = [x for x in self if x.whole and not x.needed and not self._is_seed]
            for surplus in sorted(unasked, key=lambda x: x.manifest.policy)[:-KEPT_OBJECTS]:
                self.withdraw(surplus.root)
        return intake

    def _finish(self, intake: Intake) -> None:
        for feed in intake.feeds:
            self._halt(feed)
        intake.feeds = []
        self._links.do(Say(Whole(intake.root, "")))

    # ---- chunks ------------------------------------------------------------------------------------------------

    def accepts(self, link: Link, stream: int, chunk: int, nbytes: int) -> str | None:
        """Root of the object that the announced chunk belongs to; None when it is to be read and thrown away."""
        intake = self.get(link.feeds.get(stream))
        if intake is None or not intake.open or chunk >= intake.count or intake.here[chunk]:
            return None
        return intake.root if nbytes == intake.length(chunk) else None

    def stored(self, root: str, stream: int, chunk: int, now: float) -> bool:
        """The chunk was right and is in the file; False when it was here before."""
        intake = self._intakes.get(root)
        if intake is None or stream <= intake.after_stream or not intake.stored(chunk, now):
            return False
        self.received_bytes += intake.length(chunk)
        for feed in intake.feeds:
            if feed.stream == stream:
                feed.got_chunk(now)
                self._sent_by[feed.source.node_id] += intake.length(chunk)
            elif feed.stream is not None:
                link = self._links.to(feed.source.node_id, feed.lane)
                if link is not None:
                    self._links.say(link, Have(feed.stream, (chunk,)))
        if intake.whole:
            self._finish(intake)
        return True

    def sent_by(self, peer: str) -> int:
        """Bytes of chunks so far."""
        return self._sent_by[peer]

    def accused(self, now: float) -> list[str]:
        """Peers that sent a wrong chunk or let us starve lately."""
        return self._accusations.peers(now)

    def wrong(self, link: Link, root: str, chunk: int, now: float) -> None:
        """The chunk was not what the manifest says: its sender is left and told on."""
        intake = self._intakes.get(root)
        if intake is not None:
            intake.shunned.add(link.peer)
        self._accusations.add(link.peer, now)
        self._links.event("relay_wrong_chunk", peer=link.peer, root=root[:16], chunk=chunk)
        self._links.hang_up(link, f"chunk {chunk} is not what the manifest says")

    # ---- feeds -------------------------------------------------------------------------------------------------

    def link_up(self, now: float) -> None:
        for intake in self:
            for feed in intake.feeds:
                self._ask(intake, feed, now)

    def link_down(self, link: Link, why: str, now: float) -> None:
        for intake in self:
            for feed in intake.feeds:
                if feed.stream is not None and feed.stream in link.feeds:
                    self._leave(intake, feed, why, now)

    def dial_failed(self, peer: str, lane: int, why: str, now: float) -> None:
        for intake in self:
            for feed in intake.feeds:
                if feed.stream is None and feed.source.node_id == peer and lane in self._lanes_of(feed):
                    self._leave(intake, feed, f"it cannot be reached: {why}", now)

    def refused(self, link: Link, stream: int, why: str, now: float) -> None:
        intake = self.get(link.feeds.pop(stream, None))
        for feed in intake.feeds if intake is not None else ():
            if feed.stream == stream and intake is not None:
                self._leave(intake, feed, f"it refused: {why}", now)

    def backlog(self, link: Link, held: Mapping[int, int], now: float) -> None:
        """The parent told, per stream, how many chunks it could send us."""
        for stream, backlog in held.items():
            intake = self.get(link.feeds.get(stream))
            for feed in intake.feeds if intake is not None else ():
                if feed.stream == stream and intake is not None:
                    feed.parent_has(backlog, intake.manifest.chunk_size, now)

    def stood_still(self, seconds: float, now: float) -> None:
        """It was us, not those who feed us."""
        for intake in self:
            intake.gained_s = min(intake.gained_s + seconds, now)
            for feed in intake.feeds:
                feed.stood_still(seconds, now)

    def tick(self, now: float) -> None:
        """Leave sources that starve us; try again after a pause; tell the program when nothing helps."""
        for intake in self:
            chunk_s = max((feed.chunk_s for feed in intake.feeds), default=now)
            for feed in intake.feeds:
                source_bytes = self._sent_by[feed.source.node_id]
                feed.received(source_bytes, self.received_bytes, intake.manifest.chunk_size, now)
                flow_s = max(chunk_s, self._flow_s(feed))
                if blame := feed.starves(flow_s, now):
                    self._blame(feed, now)
                if why := blame or feed.fails(flow_s, now):
                    self._leave(intake, feed, why, now)
                self._ask(intake, feed, now)
            if intake.needed and intake.open and not intake.whole and now - intake.gained_s > STUCK_S:
                intake.gained_s, intake.stuck = now, True
                why = "nobody sends it" if intake.feeds else "the seed has assigned nobody to send it"
                self._links.do(Say(Stuck(intake.root, "", why)))

    def _take_feeds(self, intake: Intake, feeds: Sequence[Feed], now: float) -> None:
        """Feeds that stay as they were go on undisturbed."""
        before = {state.feed: state for state in intake.feeds}
        after = []
        for place, feed in enumerate(feeds):
            state = before.pop(feed) if feed in before else FeedState(feed, place * self._lanes, now)
            after.append(state)
        for gone in before.values():
            self._halt(gone)
        intake.feeds = after if intake.missing else []
        for state in intake.feeds:
            self._ask(intake, state, now)

    def _blame(self, feed: FeedState, now: float) -> None:
        """For being slow. When the next source is slow as well, we are."""
        if feed.blamed:
            self._accusations.withdraw(feed.blamed)
        elif feed.source.node_id != SEED:
            self._accusations.add(feed.source.node_id, now)
        feed.blamed = feed.source.node_id

    def _flow_s(self, feed: FeedState) -> float:
        """When a connection of the feed brought anything."""
        links = [self._links.to(feed.source.node_id, lane) for lane in self._lanes_of(feed)]
        return max((link.flow_s for link in links if link is not None), default=float("-inf"))

    def _lanes_of(self, feed: FeedState) -> range:
        return range(feed.lane, feed.lane + self._lanes)

    def _ask(self, intake: Intake, feed: FeedState, now: float) -> None:
        """Say what we want, once the connections are there."""
        if not intake.open or intake.whole or feed.stream is not None or now < feed.not_before_s:
            return
        feed.skip({*self._unreachable.peers(now), *intake.shunned})
        links = [self._links.to(feed.source.node_id, lane) for lane in self._lanes_of(feed)]
        if None in links:
            if feed.dialling_since_s is None:
                feed.dialling_since_s = now
            for lane in self._lanes_of(feed):
                self._links.dial(feed.source, lane)
            return
        self._streams += 1
        feed.stream, feed.chunk_s, feed.dialling_since_s = self._streams, now, None
        have = pack_flags(intake.here) if intake.missing < intake.count else b""
        spills = feed.feed.spills or feed.at > 0  # whoever stands in for a failed source carries all that is left
        pace = feed.feed.pace_bytes_per_s / self._lanes if feed.at == 0 else 0.0  # who stands in may have to hurry
        want = Want(self._streams, intake.root, feed.feed.stretches, spills, have, pace)
        for link in links:
            assert link is not None, "looked at above"
            link.feeds[self._streams] = intake.root
            self._links.say(link, want)

    def _leave(self, intake: Intake, feed: FeedState, why: str, now: float) -> None:
        """Turn to the feed's next source."""
        left = feed.source.node_id
        self._halt(feed)
        feed.turn(intake.shunned, now)
        self.reparentings += left != feed.source.node_id
        self._links.event("relay_reparented", left=left, now=feed.source.node_id, why=why, root=intake.root[:16])
        self._ask(intake, feed, now)

    def _halt(self, feed: FeedState) -> None:
        stream, feed.stream = feed.stream, None
        if stream is None:
            return
        for link in self._links:
            if link.feeds.pop(stream, None) is not None:
                self._links.say(link, Halt(stream))
