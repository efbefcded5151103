"""A relay's decisions: whom to ask, what to send, whom to leave.

    program ──bring, publish, hold──▶ ┌──────┐ ◀── link up/down, control frames, chunks, time ── shell
                                      │ Node │
    program ◀── whole, stuck, tally ──└──────┘ ── dial, hang up, open file, wake a link ───────▶ shell

Invariant: a chunk is offered to children only after the shell said that it was verified and stored (I6); every source
that fails is left for the next one, and every wait here ends by ``tick`` (I7). No clock, sockets, threads or files.

The side that dialled a link is its child. Lane 0 to the seed carries reports and assignments too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.control import Tally
from echo2.broadcast.relay.links import BEAT_S, SILENCE_S, Action, Link, Links, Out, Say
from echo2.broadcast.relay.meter import RateMeter
from echo2.broadcast.relay.receiver import Receiver
from echo2.broadcast.relay.redial import Redial
from echo2.broadcast.relay.server import Server
from echo2.broadcast.relay.standing import WARM_BYTES, Standing
from echo2.broadcast.relay.unreachable import Unreachable
from echo2.errors import Malformed

WARM_AGAIN_S = 2.0
"""Padding is sent at most so often."""
STOOD_STILL_S = SILENCE_S / 3
"""Without a tick for longer we stood still ourselves, and nobody could be heard (field report H05). So much of it
counts all the same, since who is late all the time must notice dead links, too."""
REPORT_S = 0.5
MOST_NAMED = 256
"""Peers that a part of a report may name."""


class Node:
    def __init__(
        self, node_id: str, seed: f.Source | None, lanes: int = 1, now: float = 0.0, first_stream: int = 0
    ) -> None:
        """seed: where the seed is dialled; None for the seed itself.  lanes: connections per feed.

        first_stream: number of the first stream, below 2**31. A parent that has not noticed yet that we started again
        must not take our streams for those of our earlier life, so every life begins elsewhere.
        """
        self._seed = seed
        self._redial = Redial(first_stream, now)
        self._links = Links(node_id, seed, self._redial)
        self._unreachable = Unreachable()
        self._receiver = Receiver(self._links, lanes, seed is None, first_stream, self._unreachable)
        self._server = Server(self._links, self._receiver, seed is None)
        self._standing = Standing(self._links, lanes)
        self._meters: dict[str, RateMeter] = {}
        self._ended: Counter[str] = Counter()
        """Bytes that came over links that are gone, by peer."""
        self._bases: tuple[str, ...] = ()
        self._sent_bytes = 0
        self._seed_sent_bytes = 0
        """The seed had, when its link came up."""
        self._reported: f.Report | None = None
        self._told: Tally | None = None
        self._report_s = now
        self._ticked_s = now

    def take(self) -> list[Action]:
        """What the shell must do now, in order."""
        return self._links.take()

    # ---- the program -------------------------------------------------------------------------------------------

    def publish(self, manifest: Manifest, now: float) -> None:
        """The object is whole in a file that the shell has opened."""
        self._server.opened(self._receiver.publish(manifest, now))

    def bring(self, manifest: Manifest, now: float) -> None:
        """The program needs the object."""
        self._receiver.bring(manifest, now)
        self._server.look_for_withdrawn()

    def withdraw(self, root: str) -> None:
        self._receiver.withdraw(root)
        self._server.look_for_withdrawn()

    def hold(self, decoded_roots: Sequence[str]) -> None:
        """Snapshots that lie decoded on this machine: bases for deltas."""
        self._bases = tuple(decoded_roots)[:64]

    # ---- files -------------------------------------------------------------------------------------------------

    def opened(self, root: str, here: bytearray, now: float) -> None:
        """The shell opened the object's file, which holds these chunks (one byte per chunk, 1 for had)."""
        intake = self._receiver.opened(root, here, now)
        if intake is not None:
            self._server.opened(intake)

    def file_failed(self, root: str, why: str) -> None:
        """The object's file cannot be opened or written, for want of room perhaps."""
        self._receiver.failed(root, why)
        self._server.look_for_withdrawn()

    # ---- links -------------------------------------------------------------------------------------------------

    def link_up(self, number: int, peer: str, outbound: bool, lane: int, now: float) -> None:
        link = self._links.up(number, peer, outbound, lane, now)
        if not outbound:
            return
        if peer == SEED:
            self._redial.answered(now)
        if self._is_seed_link(link):
            self._reported = None
            self._seed_sent_bytes = self._receiver.sent_by(SEED)
            self._standing.forget()
            self._receiver.forget_generations()
        self._unreachable.answered(peer)
        self._standing.warm(link, now)
        self._receiver.link_up(now)
        self._links.wake(link)

    def dial_failed(self, peer: str, lane: int, why: str, now: float, missed: bool = True) -> None:
        """missed: there is no way to the peer; else it was slow to greet, or the cause lies here."""
        self._links.undial(peer, lane)
        if peer == SEED:
            self._redial.failed(now)
        elif missed and self._hears_seed(now):  # else it is we who are cut off, perhaps
            self._unreachable.failed(peer, now)
        self._receiver.dial_failed(peer, lane, why, now)

    def link_down(self, number: int, why: str, now: float) -> None:
        link = self._links.down(number)
        if link is None:
            return
        if link.outbound:
            self._ended[link.peer] += link.received_bytes
        if self._is_seed_link(link):
            self._redial.lost(now, brought=self._receiver.sent_by(SEED) > self._seed_sent_bytes)
        self._receiver.link_down(link, why, now)

    def heard(self, number: int, now: float) -> None:
        """Bytes came in, of whatever kind."""
        link = self._links.get(number)
        if link is not None:
            link.heard_s = now

    def next_out(self, number: int, now: float) -> Out | None:
        """What the link sends next; chosen at the last moment."""
        link = self._links.get(number)
        return None if link is None else link.next_out(self._server.is_sending, now)

    def sent_chunk(self, nbytes: int) -> None:
        self._sent_bytes += nbytes

    def unreadable(self, number: int, stream: int) -> None:
        """A chunk that the link should send on this stream cannot be read."""
        if (link := self._links.get(number)) is not None:
            self._server.refuse(link, stream, "I cannot read it")

    @property
    def is_sending(self) -> bool:
        """Whether chunks wait to be sent."""
        return self._server.is_sending()

    def say(self, number: int, control: f.Control) -> None:
        """Send a control frame that others decided on."""
        if (link := self._links.get(number)) is not None:
            self._links.say(link, control)

    # ---- frames ------------------------------------------------------------------------------------------------

    def control(self, number: int, frame: f.AnyControl, now: float) -> None:
        """A frame between nodes. Raises Malformed for one that this peer may not send."""
        link = self._links.get(number)
        if link is None:
            return
        match frame:
            case f.Beat(held):
                self._receiver.backlog(link, held, now)
            case f.Warm(nbytes) if not link.outbound:
                if now - link.warmed_s > WARM_AGAIN_S:
                    link.warmed_s = now
                    link.pad(nbytes, now)
                    self._links.wake(link)
            case f.Want() if not link.outbound:
                self._server.want(link, frame, now)
            case f.Have() if not link.outbound:
                self._server.have(link, frame)
            case f.Halt(stream) if not link.outbound:
                self._server.halt(link, stream)
            case f.Probe() if self._is_seed_link(link):
                self._links.say(link, f.Warm(WARM_BYTES))
            case f.Refuse(stream, why) if link.outbound:
                self._receiver.refused(link, stream, why, now)
            case _:
                raise Malformed(f"{link.peer} may not say {type(frame).__name__} on this link")

    def assign(self, frame: f.Assign, manifest: Manifest | None, now: float) -> None:
        """Our part in a plan, from the seed; ``manifest`` is the verified one inside, None for standing links."""
        if manifest is None:
            busy = {feed.source.node_id for intake in self._receiver for feed in intake.feeds}
            self._standing.take(frame, busy, now)
            return
        self._receiver.assign(frame, manifest, now)
        self._server.look_for_withdrawn()
        for link in self._links:
            self._server.consider(link, now)

    def from_seed(self, number: int) -> bool:
        """Whether assignments may come over this link."""
        link = self._links.get(number)
        return link is not None and self._is_seed_link(link)

    # ---- chunks ------------------------------------------------------------------------------------------------

    def accepts(self, number: int, stream: int, chunk: int, nbytes: int) -> str | None:
        """Root of the object that the announced chunk belongs to; None when it is to be read and thrown away."""
        link = self._links.get(number)
        return None if link is None else self._receiver.accepts(link, stream, chunk, nbytes)

    def stored(self, root: str, stream: int, chunk: int, now: float) -> None:
        """The chunk was right and is in the file."""
        if self._receiver.stored(root, stream, chunk, now):
            self._server.stored(root, chunk)

    def wrong(self, number: int, root: str, chunk: int, now: float) -> None:
        """The chunk was not what the manifest says."""
        link = self._links.get(number)
        if link is not None:
            self._receiver.wrong(link, root, chunk, now)

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, received: Mapping[int, int], now: float) -> None:
        """About ten times a second. received: bytes that came in over each link since it was made."""
        late_s, self._ticked_s = now - self._ticked_s, now
        self._measure(received, late_s, now)
        stood_still_s = max(late_s - STOOD_STILL_S, 0.0)
        for link in self._links:
            link.heard_s = min(link.heard_s + stood_still_s, now)
            if now - link.heard_s > SILENCE_S:
                self._links.hang_up(link, f"silent for {SILENCE_S:g} s")
            elif link.beat(now):
                self._links.wake(link)
            if link.pending:
                self._server.consider(link, now)
        if stood_still_s:
            self._receiver.stood_still(stood_still_s, now)
        self._receiver.tick(now)
        self._standing.tick(now)
        if self._seed is not None and self._redial.due(now):
            self._links.dial(self._seed, 0)
        if now - self._report_s >= REPORT_S:
            self._report_s = now
            self._report()
            self._standing.keep(self._unreachable.peers(now))

    def _measure(self, received: Mapping[int, int], elapsed_s: float, now: float) -> None:
        totals: Counter[str] = Counter()
        for link in self._links:
            link.received(received.get(link.number, 0), elapsed_s, now)
            if link.outbound:
                totals[link.peer] += link.received_bytes
        for peer, total in totals.items():
            self._meters.setdefault(peer, RateMeter()).sample(total + self._ended[peer], now)

    # ---- reports -----------------------------------------------------------------------------------------------

    def _is_seed_link(self, link: Link) -> bool:
        return link.outbound and link.peer == SEED and link.lane == 0

    def _hears_seed(self, now: float) -> bool:
        link = self._links.to(SEED, 0)
        return link is not None and now - link.heard_s < 2 * BEAT_S

    def tally(self) -> Tally:
        shares = {x.root: 1.0 - x.missing / max(x.count, 1) for x in self._receiver if x.open}
        return Tally(self._sent_bytes, self._receiver.received_bytes, self._receiver.reparentings, shares)

    def report(self) -> f.Report:
        """What the seed should know."""
        whole = [x.root for x in self._receiver if x.whole]
        under_way = [x for x in self._receiver if x.open and not x.whole]
        return f.Report(
            held=self._bases,
            complete=tuple(whole[-64:]),
            needs=tuple(x.root for x in self._receiver if x.needed and not x.whole)[-64:],
            progress={x.root: x.count - x.missing for x in under_way[-64:]},
            edges=dict(list(self._edges())[-MOST_NAMED:]),
            sent_bytes=self._sent_bytes,
            received_bytes=self._receiver.received_bytes,
            reparentings=self._receiver.reparentings,
            accused=tuple(self._receiver.accused(self._ticked_s))[:MOST_NAMED],
            unreachable=tuple(self._unreachable.peers(self._ticked_s))[:MOST_NAMED],
        )

    def _edges(self) -> Iterator[tuple[str, float]]:
        """Peers and rates, those that we have known longest first."""
        for peer, meter in self._meters.items():
            if (rate := meter.peak_bytes_per_s()) > 0:
                yield peer, rate

    def _report(self) -> None:
        """Tell seed and program what changed."""
        if self._seed is None:
            return
        report, tally = self.report(), self.tally()
        link = self._links.to(SEED, 0)
        if link is not None and report != self._reported:
            self._reported = report
            self._links.say(link, report)
        if tally != self._told:
            self._told = tally
            self._links.do(Say(tally))
