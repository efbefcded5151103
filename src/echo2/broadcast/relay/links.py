"""A relay's links as its core sees them, and what the core asks the shell to do.

Invariant: what a link sends next is decided when it can be sent, so nothing stale waits in a queue; a link is dialled
once at a time, and its dialling side is the child. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.relay.control import Event, Word
from echo2.broadcast.relay.frames import MAX_PADDING_BYTES, Beat, Control, Source, Want, encode_control
from echo2.broadcast.relay.meter import is_flow
from echo2.broadcast.relay.redial import Redial
from echo2.broadcast.relay.serving import Serving

SILENCE_S = 1.5
"""A link without a single byte for so long is dead, whatever TCP believes (field report H07)."""
BEAT_S = 0.5
MOST_UNSENT_BYTES = 128 * 1024 * 1024
"""Of control frames that wait. An honest peer reads; the largest frames, a few of which may wait, are those that hold a
manifest."""
WARM_S = 3.0
"""Padding is sent at most so long: what a connection of 50 ms needs to find its rate beside others that do the same."""


class Dial(msgspec.Struct, frozen=True):
    source: Source
    lane: int


class Hangup(msgspec.Struct, frozen=True):
    link: int
    why: str


class Wake(msgspec.Struct, frozen=True):
    """The link has something to send."""

    link: int


class Pace(msgspec.Struct, frozen=True):
    """Let the link send no faster than this; 0 for as fast as it goes."""

    link: int
    bytes_per_s: float


class OpenFile(msgspec.Struct, frozen=True):
    """Open (or make) the object's file, then say ``opened``."""

    manifest: Manifest


class CloseFile(msgspec.Struct, frozen=True):
    """The object is not wanted any more: remove its file, if it is ours."""

    root: str


class Say(msgspec.Struct, frozen=True):
    """To the program."""

    word: Word


Action = Dial | Hangup | Wake | Pace | OpenFile | CloseFile | Say


class ChunkOut(msgspec.Struct, frozen=True):
    """Send this chunk."""

    root: str
    stream: int
    number: int


class PaddingOut(msgspec.Struct, frozen=True):
    nbytes: int


Out = bytes | ChunkOut | PaddingOut


class Link:
    """A greeted connection."""

    def __init__(self, number: int, peer: str, outbound: bool, lane: int, now: float) -> None:
        self.number = number
        self.peer = peer
        self.outbound = outbound
        """We dialled it: we are the child and the other side sends chunks."""
        self.lane = lane
        self.heard_s = now
        self.beat_s = now
        self.received_bytes = 0
        self.flow_s = float("-inf")
        """When more came than what keeps the link alive."""
        self.warmed_s = float("-inf")
        """When padding was last asked for."""
        self.measured = False
        """We asked for enough of it to see how fast the link is."""
        self.servings: dict[int, Serving] = {}
        """By the child's stream number: what is sent here."""
        self.feeds: dict[int, str] = {}
        """By our stream number: root of the object that comes here."""
        self.pending: list[tuple[Want, float]] = []
        """Asked for by a child that no assignment of ours names yet, and since when."""
        self._pace = 0.0
        self._controls: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._padding = 0
        self._padding_until_s = 0.0

    def received(self, total_bytes: int, elapsed_s: float, now: float) -> None:
        """Since the link was made, ``elapsed_s`` after the last time."""
        gained = total_bytes - self.received_bytes
        if gained > 0:
            self.heard_s = now  # a slow line may need seconds for what TLS decrypts at once
        if is_flow(gained, elapsed_s):
            self.flow_s = now
        self.received_bytes = max(self.received_bytes, total_bytes)

    def streams(self) -> set[int]:
        """The child's numbers of what it asked for here."""
        return {*self.servings, *(want.stream for want, _ in self.pending)}

    def new_pace(self) -> float | None:
        """Bytes per second that became the link's limit just now, 0 for none; None when nothing changed."""
        paces = [serving.pace_bytes_per_s for serving in self.servings.values()]
        before, self._pace = self._pace, max(paces) if paces and all(paces) else 0.0
        return self._pace if self._pace != before else None

    def say(self, control: Control) -> None:
        frame = encode_control(control)
        self._controls.append(frame)
        self._unsent_bytes += len(frame)

    @property
    def is_deaf(self) -> bool:
        """The other side does not read what it is told, and what waits for it takes too much memory."""
        return self._unsent_bytes > MOST_UNSENT_BYTES

    def pad(self, nbytes: int, now: float) -> None:
        self._padding, self._padding_until_s = nbytes, now + WARM_S

    def beat(self, now: float) -> bool:
        """Queue a heartbeat when one is due."""
        if now - self.beat_s < BEAT_S:
            return False
        self.beat_s = now
        self.say(Beat({stream: serving.backlog for stream, serving in self.servings.items()}))
        return True

    def next_out(self, busy: Callable[[], bool], now: float) -> Out | None:
        """Control frames first, then chunks of the oldest version, then padding while nobody is ``busy``."""
        if self._controls:
            frame = self._controls.popleft()
            self._unsent_bytes -= len(frame)
            return frame
        for serving in sorted(self.servings.values(), key=lambda s: s.policy) if self.servings else ():
            if (number := serving.next()) is not None:
                return ChunkOut(serving.root, serving.stream, number)
        if self._padding > 0 and now < self._padding_until_s and not busy():
            nbytes = min(MAX_PADDING_BYTES, self._padding)
            self._padding -= nbytes
            return PaddingOut(nbytes)
        return None


class Links:
    """All links of a node, and the actions that wait for the shell."""

    def __init__(self, node_id: str, seed: Source | None, redial: Redial) -> None:
        """seed: where this node dials the seed, whatever a plan says of its address.  redial: when it may."""
        self._redial = redial
        self._node_id = node_id
        self._seed = seed
        self._links: dict[int, Link] = {}
        self._out: dict[tuple[str, int], int] = {}
        """Links that we dialled, by peer and lane."""
        self._dialling: set[tuple[str, int]] = set()
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def do(self, action: Action) -> None:
        self._actions.append(action)

    def event(self, kind: str, **fields: str | int | float | bool) -> None:
        self.do(Say(Event(kind, fields)))

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def get(self, number: int) -> Link | None:
        return self._links.get(number)

    def to(self, peer: str, lane: int) -> Link | None:
        """The link that we dialled."""
        return self._links.get(self._out.get((peer, lane), -1))

    def dialled(self) -> list[Link]:
        return [self._links[number] for number in self._out.values()]

    def up(self, number: int, peer: str, outbound: bool, lane: int, now: float) -> Link:
        link = self._links[number] = Link(number, peer, outbound, lane, now)
        if outbound:
            self._dialling.discard((peer, lane))
            before = self.to(peer, lane)
            self._out[peer, lane] = number
            if before is not None:
                self.hang_up(before, "a newer connection took its place")
        return link

    def down(self, number: int) -> Link | None:
        link = self._links.pop(number, None)
        if link is not None and link.outbound and self._out.get((link.peer, link.lane)) == number:
            del self._out[link.peer, link.lane]
        return link

    def dial(self, source: Source, lane: int) -> None:
        """Unless it is there, or being made, or has to wait."""
        if self._seed is not None and source.node_id == self._seed.node_id:
            if self._redial.rests:
                return
            source = self._seed
        key = (source.node_id, lane)
        if key not in self._out and key not in self._dialling and source.node_id != self._node_id:
            self._dialling.add(key)
            self.do(Dial(source, lane))

    def undial(self, peer: str, lane: int) -> None:
        """Dialling failed."""
        self._dialling.discard((peer, lane))

    def say(self, link: Link, control: Control) -> None:
        link.say(control)
        if link.is_deaf:
            self.hang_up(link, "it does not read what it is told")
        self.wake(link)

    def wake(self, link: Link) -> None:
        self.do(Wake(link.number))

    def pace(self, link: Link) -> None:
        """After what is sent over the link became other."""
        if (pace := link.new_pace()) is not None:
            self.do(Pace(link.number, pace))

    def hang_up(self, link: Link, why: str) -> None:
        self.do(Hangup(link.number, why))
