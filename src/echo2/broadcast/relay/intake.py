"""An object as its receiver sees it: what is here, and who is asked for the rest.

Invariant: a feed asks one source at a time and always has a next one to turn to; a source that sent a wrong chunk is
not asked for this object again (the seed excepted, after a pause). Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay.frames import Feed, Source

STARVED_S = 3.0
"""A parent that has chunks for us and sends too few for so long is left."""
TOO_FEW = 0.25
"""Of what the parent gains itself. An honest parent on a crowded line does better; leaving one costs more than it."""
TOO_FEW_PLANNED = 0.15
"""Of the planned rate, when the parent gains nothing more."""
PLANNED_TURNS = 2
"""After so many turns for a low rate the plan is not believed any more: every source is slow, so we are."""
LEAST_BACKLOG = 4
"""Chunks a parent must have for us before it can be blamed."""
SILENT_S = 6.0
"""A source whose connections bring nothing for so long, while no other source brings a chunk, is left, whatever it
says. Bytes count, since a large chunk takes a slow line longer than that."""
ENOUGH = 0.5
"""Of a source's planned rate: while so much comes from all sources together, nobody is left for a trickle."""
TRICKLE_S = 10.0
"""When far less comes than a source was planned to send for so long, it is left even if it says that it has nothing for
us. By then those above it are over a trouble of theirs."""
DIAL_S = 8.0
"""A source to which no connection came about for so long is left, whatever holds it up; a name server, perhaps."""
ROUND_PAUSE_S = 0.5
"""Before the first source is asked again after the last one failed."""
STUCK_S = 20.0
"""An object that is needed and gains nothing for so long is reported to the program."""


class FeedState:
    """One feed of an object that is coming in."""

    def __init__(self, feed: Feed, lane: int, now: float) -> None:
        self.feed = feed
        self.lane = lane
        """First of the connections to its source that it uses."""
        self.at = 0
        """Index of the source that is asked."""
        self.stream: int | None = None
        """Number of the stream that is open; None while a connection is made or a pause runs."""
        self.not_before_s = now
        self.chunk_s = now
        """When the last chunk came, or the source was turned to."""
        self._window: tuple[float, int] | None = None
        """When the running window began, and the parent's backlog then."""
        self._chunks = 0
        """That came in it."""
        self._starves = False
        self._turns = 0
        self.dialling_since_s: float | None = None
        """The stream waits for connections to the source."""
        self.blamed = ""
        """The source that was left last because it was slow; empty for none."""
        self._backlog = 0
        """Chunks that the parent said it has for us."""
        self._look: tuple[float, int, int] | None = None
        """When the bytes that came were looked at, how many they were from the source, and from anybody."""
        self._trickles = False

    @property
    def source(self) -> Source:
        return self.feed.sources[self.at]

    def turn(self, shunned: set[str], now: float) -> None:
        """To the next source."""
        self._turns += self._starves or self._trickles
        self.stream, self.chunk_s, self.dialling_since_s = None, now, None
        self._window, self._chunks, self._starves, self._backlog = None, 0, False, 0
        self._look, self._trickles = None, False
        for _ in self.feed.sources:
            self.at += 1
            if self.at == len(self.feed.sources):
                self.at, self.not_before_s = 0, now + ROUND_PAUSE_S
            if self.source.node_id not in shunned or self.source.node_id == SEED:
                return

    def got_chunk(self, now: float) -> None:
        self.chunk_s = now
        self._chunks += 1

    def parent_has(self, backlog: int, chunk_bytes: int, now: float) -> None:
        """The parent told how many chunks it could send us."""
        self._backlog = backlog
        if self._window is None:
            self._window, self._chunks = (now, backlog), 0
        began_s, before = self._window
        elapsed_s = now - began_s
        if elapsed_s < STARVED_S:
            return
        gained = backlog - before + self._chunks
        planned = self.feed.rate_bytes_per_s * elapsed_s / chunk_bytes
        least = TOO_FEW * min(gained, planned or gained)  # it may gain far more than its own line carries
        if self._turns < PLANNED_TURNS:
            least = max(least, TOO_FEW_PLANNED * planned)
        self._starves = backlog >= LEAST_BACKLOG and self._chunks < least
        self._window, self._chunks = (now, backlog), 0

    def received(self, source_bytes: int, total_bytes: int, chunk_bytes: int, now: float) -> None:
        """Of any object, from the source and from anybody, so far: a newer object may have to wait for an older one,
        and feeds of a ring bring theirs by turns, each at full speed."""
        if self._look is None or self.stream is None:
            self._look = (now, source_bytes, total_bytes)
        began_s, source_before, total_before = self._look
        if now - began_s < TRICKLE_S:
            return
        planned = self.feed.rate_bytes_per_s * (now - began_s)
        few = source_bytes - source_before < TOO_FEW_PLANNED * planned - chunk_bytes
        self._trickles = self._turns < PLANNED_TURNS and few and total_bytes - total_before < ENOUGH * planned
        self._look = (now, source_bytes, total_bytes)

    def stood_still(self, seconds: float, now: float) -> None:
        """Time in which nothing could be heard does not count."""
        self.chunk_s = min(self.chunk_s + seconds, now)
        if self._window is not None:
            self._window = (self._window[0] + seconds, self._window[1])
        if self._look is not None:
            self._look = (self._look[0] + seconds, *self._look[1:])
        if self.dialling_since_s is not None:
            self.dialling_since_s += seconds

    def fails(self, flow_s: float, now: float) -> str:
        """Why this source must be left although it may not be to blame; empty when it need not be.

        flow_s: when any feed of the object brought a chunk, in a ring they do so by turns, or a connection of this one
        anything.
        """
        if self.dialling_since_s is not None and now - self.dialling_since_s >= DIAL_S:
            return f"no connection to it for {DIAL_S:g} s"
        if self._is_silent(flow_s, now):
            return f"nothing for {SILENT_S:g} s, and it says that it has nothing"
        others = len(self.feed.sources) > 1
        return f"far less than planned for {TRICKLE_S:g} s" if self._trickles and others else ""

    def starves(self, flow_s: float, now: float) -> str:
        """Why this source is to blame and must be left; empty when it need not be."""
        if self._backlog and self._is_silent(flow_s, now):
            return f"it has chunks and sent none for {SILENT_S:g} s"
        others = len(self.feed.sources) > 1
        return f"it has chunks and sends too few for {STARVED_S:g} s" if self._starves and others else ""

    def _is_silent(self, flow_s: float, now: float) -> bool:
        return self.stream is not None and now - max(flow_s, self.chunk_s) >= SILENT_S

    def skip(self, avoided: Collection[str]) -> None:
        """Over sources that are not asked. The last is the seed, which always may be."""
        while self.source.node_id in avoided and self.at < len(self.feed.sources) - 1:
            self.at += 1


class Intake:
    """An object under way, or here."""

    def __init__(self, manifest: Manifest, now: float, after_stream: int = 0) -> None:
        """after_stream: the newest stream so far; what still comes on those is of an earlier life of the object, and
        lies in a file that is gone."""
        self.manifest = manifest
        self.after_stream = after_stream
        self.root = manifest.object_root
        self.count = len(manifest.chunks)
        self.here = bytearray(self.count)
        """One byte per chunk: 1 for verified and stored."""
        self.missing = self.count
        self.open = False
        """Its file is open: chunks can be stored."""
        self.opening = False
        """Its file is being opened, or looked at again."""
        self.needed = False
        """The program asked for it."""
        self.stuck = False
        """The program was told that it comes no nearer, and may have repaired its file since."""
        self.generation = -1
        self.feeds: list[FeedState] = []
        self.children: frozenset[str] = frozenset()
        self.planned_children = 0
        self.shunned: set[str] = set()
        self.gained_s = now
        """When it last came nearer to being whole, or the program was told that it does not."""

    @property
    def whole(self) -> bool:
        return self.open and self.missing == 0

    def length(self, number: int) -> int:
        first = number * self.manifest.chunk_size
        return min(self.manifest.chunk_size, self.manifest.object_size - first)

    def opened(self, here: bytearray) -> None:
        """The file is open and holds these chunks; others may have been stored while it was looked at."""
        self.here = bytearray(before | found for before, found in zip(self.here, here, strict=True))
        self.missing = self.count - sum(self.here)
        self.open, self.opening = True, False

    def stored(self, number: int, now: float) -> bool:
        """False when it was here before."""
        if self.here[number]:
            return False
        self.here[number] = 1
        self.missing -= 1
        self.gained_s = now
        return True
