"""Lines between programs, with latency, bandwidth, loss and outages.

Invariant: a request that a live coordinator received is handled there to the end, whatever becomes of the line, as over
HTTP, unless its client dies; a reply may be lost after it took effect, so retries meet their own traces (field report
D08). Objects take other ways (``sources``, ``relaying``), over the same lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec

from echo2.errors import Echo2Error, TransportError
from echo2.simulation.flows import Pipe
from echo2.transport.messages import Heartbeat, Principal, Reply, Request

OUTAGE_DELAY_S = 5.0
"""How long a caller waits before it believes that nobody answers."""


class Handler(Protocol):
    async def handle(self, principal: Principal, request: Request) -> Reply: ...


class LinkModel(msgspec.Struct, frozen=True):
    latency_s: float = 0.02
    """One way."""
    jitter: float = 0.2
    """Share of the latency that varies."""
    bytes_per_s: float = 12.5e6
    """Down, and up as well unless that is said apart."""
    up_bytes_per_s: float = 0.0
    """0: as fast as down."""
    reachable: bool = True
    """Others can dial this machine; one that they cannot feeds nobody."""
    loss: float = 0.0
    """Probability that a request or a reply is lost; objects lose so much of the line's rate."""


class Desk:
    """Where a coordinator's life receives requests; replaced when the coordinator restarts."""

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self._under_way: dict[asyncio.Task[None], str] = {}
        """What is being handled, and of whom."""
        self._crash: Exception | None = None
        self._crashed = asyncio.Event()
        self.watchers: list[Callable[[], None]] = []
        """Called when a life ends."""

    @property
    def is_open(self) -> bool:
        return self._handler is not None

    async def serve(self, handler: Handler, until: asyncio.Event) -> None:
        """Answer until ``until`` is set or this call is cancelled; requests under way die with it.

        Raises what a handler raised that is no answer.
        """
        self._handler = handler
        try:
            async with asyncio.TaskGroup() as group:
                stop = group.create_task(until.wait(), name="the coordinator's end")
                stop.add_done_callback(lambda _: self._crashed.set())
                await self._crashed.wait()
                stop.cancel()
        finally:
            self._handler, self._crashed = None, asyncio.Event()
            left = list(self._under_way)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
            for watcher in list(self.watchers):
                watcher()
        if self._crash is not None:
            raise self._crash

    def take(self, principal: Principal, request: Request, answer: Callable[[Reply | Echo2Error], None]) -> None:
        """Handle the request to its end and call ``answer`` then; at once where nobody serves."""
        if self._handler is None:
            answer(TransportError("connection refused: the coordinator is down"))
            return
        work = self._handle(self._handler, principal, request, answer)
        name = f"handle {type(request).__name__} of {principal.peer_id}"
        self._under_way[asyncio.get_running_loop().create_task(work, name=name)] = principal.peer_id

    async def _handle(
        self, handler: Handler, principal: Principal, request: Request, answer: Callable[[Reply | Echo2Error], None]
    ) -> None:
        task = asyncio.current_task()
        assert task is not None, "it is one"
        try:
            answer(await handler.handle(principal, request))
        except Echo2Error as error:
            answer(error)
        except asyncio.CancelledError:
            answer(TransportError("connection reset: the coordinator died"))
            raise
        except Exception as error:
            self._crash = error
            self._crashed.set()
        finally:
            del self._under_way[task]

    def hang_up(self, peer_id: str) -> None:
        """Its process died, and its connections with it: a lease must not be granted to a closed socket."""
        for task, peer in list(self._under_way.items()):
            if peer == peer_id:
                task.cancel()


class Access:
    """How one machine is connected, both ways."""

    def __init__(self, link: LinkModel) -> None:
        self.latency_s = link.latency_s
        self.down = Pipe(link.bytes_per_s * (1 - link.loss))
        self.up = Pipe((link.up_bytes_per_s or link.bytes_per_s) * (1 - link.loss))


class VirtualLine:
    """One peer's Transport over its link."""

    def __init__(self, desk: Desk, principal: Principal, link: LinkModel, random: Random, beats: Random) -> None:
        """beats: for heartbeats, so that leaving some out changes nothing else."""
        self.desk = desk
        self.principal = principal
        self.link = link
        self.access = Access(link)
        self._random = random
        self._beats = beats
        self._cut = False
        self.watchers: list[Callable[[], None]] = []
        """Called when the line goes down or comes back."""
        self.beat_was_answered = False
        """The newest heartbeat."""
        self.lost_at_s = float("-inf")
        """When a request or its answer was lost last."""
        self.loses_beat = False
        """Set to lose the next heartbeat."""

    @property
    def cut(self) -> bool:
        """Set to take this peer's line down."""
        return self._cut

    @cut.setter
    def cut(self, cut: bool) -> None:
        was, self._cut = self._cut, cut
        if cut is not was:
            for watcher in list(self.watchers):
                watcher()

    @property
    def is_up(self) -> bool:
        return not self._cut and self.desk.is_open

    async def call(self, request: Request) -> Reply:
        if not isinstance(request, Heartbeat):
            return await self._exchange(request, self._random)
        self.beat_was_answered = False
        reply = await self._exchange(request, self._beats)
        self.beat_was_answered = True
        return reply

    async def _exchange(self, request: Request, random: Random) -> Reply:
        """Raises TransportError after a while when the line is down or a message is lost."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Reply] = loop.create_future()

        def arrive() -> None:
            if not answer.done():  # Else who asked is gone, and hung up.
                self.desk.take(self.principal, request, reply)

        def reply(said: Reply | Echo2Error) -> None:
            if answer.done():
                return
            if isinstance(said, Echo2Error):
                answer.set_exception(said)
            elif (delay_s := self._delay_s(said, random)) is None:
                loop.call_later(OUTAGE_DELAY_S, lose)
            else:
                loop.call_later(delay_s, hear, said)

        def hear(said: Reply) -> None:
            if not answer.done():
                answer.set_result(said)

        def lose() -> None:
            if not answer.done():
                answer.set_exception(TransportError(f"no answer over the line of {self.principal.peer_id}"))

        delay_s = self._delay_s(request, random)
        if delay_s is None:
            loop.call_later(OUTAGE_DELAY_S, lose)
        else:
            loop.call_later(delay_s, arrive)
        return await answer

    def _delay_s(self, message: Request | Reply, random: Random) -> float | None:
        """One way over the link; None when the line is down or the message is lost."""
        delay_s = self.link.latency_s * (1 + self.link.jitter * random.random())
        lost = random.random() < self.link.loss
        if random is self._beats:
            lost, self.loses_beat = lost or self.loses_beat, False
        if lost or self._cut:
            self.lost_at_s = asyncio.get_running_loop().time()
            return None
        return delay_s + len(msgspec.msgpack.encode(message)) / self.link.bytes_per_s
