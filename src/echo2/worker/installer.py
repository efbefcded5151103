"""How a worker comes to run a newer policy.

Invariant: the engine's own word is the only version there is (I5); a snapshot is switched to only after the signature,
run, element type and order of every object on the way to it, and all its bytes, were checked (I6), and any failure
leaves the old policy serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.signing import open_signed
from echo2.errors import (
    DiskFull,
    EngineError,
    IntegrityError,
    Refused,
    Starved,
    TransportError,
    Unauthorised,
    first_cause,
)
from echo2.ports import Clock, EventLog, SnapshotSource, SnapshotStock
from echo2.rollout.engine import Engine
from echo2.transport.messages import MAX_HELD, MAX_WAIT_S, AwaitPolicy, PolicyNews
from echo2.transport.patience import Backoff, Line, Recall, space_out
from echo2.types import Policy
from echo2.worker.course import Course, Leg

FETCH_LIMIT_S = 6 * 3600.0
"""Whole transfer of one object; the transport bounds each part of it far more tightly."""
BUILD_LIMIT_S = 3600.0
"""Decoding one object."""
ENGINE_LIMIT_S = 3600.0
"""Loading and activating a snapshot, running generations awaited."""


class SnapshotTerms(msgspec.Struct, frozen=True):
    """What every snapshot of the run must satisfy."""

    run_id: str
    public_key: bytes
    """Ed25519 key of the run's manifests."""
    dtype: str
    """Element type that every snapshot must declare (field report E12)."""

    def open(self, signed: bytes) -> Manifest:
        """The manifest that the run's key signed. Raises IntegrityError."""
        return open_signed(signed, self.public_key)


class Installer:
    def __init__(
        self,
        line: Line,
        source: SnapshotSource,
        stock: SnapshotStock,
        engine: Engine,
        drain: Recall,
        clock: Clock,
        events: EventLog,
        jitter: Random,
        terms: SnapshotTerms,
        on_install: Callable[[], None],
        poll_s: float = MAX_WAIT_S,
    ) -> None:
        """poll_s: how long a question for news is held while nothing is under way."""
        self._line = line
        self._source = source
        self._stock = stock
        self._engine = engine
        self._drain = drain
        self._clock = clock
        self._events = events
        self._jitter = jitter
        self._terms = terms
        self._on_install = on_install
        self._poll_s = poll_s
        self.activity = ""
        """What is going on, for people; empty when nothing is."""

    async def run(self) -> None:
        """Consumes news of policies; waits for one newer than ours; produces the installed policy; ends by drain."""
        backoff = Backoff(self._jitter, first_s=1.0)
        while not self._drain.called:
            asked_s = self._clock.monotonic()
            news = await self._drain.within(None, "news of a policy", self._ask(self._engine.installed, self._poll_s))
            if news is None or not self._is_news(news):
                await space_out(asked_s, self._clock, self._drain)
                continue
            try:
                await self._follow(news)
                backoff.reset()
            except Unauthorised:
                raise
            except (IntegrityError, EngineError, TransportError, Refused, Starved, DiskFull, OSError) as error:
                # The old policy keeps serving; the next try asks for whatever is newest by then.
                self._events.emit("install_failed", policy=str(news.current), error=str(error))
                self.activity = f"waiting: could not install {news.current}: {error}"
                await self._drain.pause(backoff.next_s())

    async def _ask(self, after: Policy | None, wait_s: float = MAX_WAIT_S) -> PolicyNews:
        held = self._stock.held()[-MAX_HELD:]
        received = dict(list(self._source.received().items())[-MAX_HELD:])
        return await self._line.call(AwaitPolicy(after, wait_s, held, received, self._engine.installed), PolicyNews)

    def _is_news(self, news: PolicyNews) -> bool:
        """Whether there is a way to go, or its end is on our own disk already."""
        current, installed = news.current, self._engine.installed
        if current is None or (installed is not None and current <= installed):
            return False
        return bool(news.path) or current in self._stock.held()

    async def _follow(self, news: PolicyNews) -> None:
        """Walk to the current policy, and on while newer ones are published. Raises what went wrong on the way."""
        if not news.path:
            assert news.current is not None, "it is held"
            await self._switch(news.current)
            return
        course = Course(self._way(news))
        while (leg := course.next) is not None and not self._drain.called:
            self.activity = f"bringing {leg.manifest.policy}"
            path = await self._bring(course, leg)
            if path is not None:
                await self._arrive(course, leg, path)

    async def _arrive(self, course: Course, leg: Leg, path: Path) -> None:
        """Decode an object; run its version if it is one to be run."""
        policy = leg.manifest.policy
        build = self._stock.build(leg.signed, leg.manifest, path)
        try:
            await self._drain.within(BUILD_LIMIT_S, f"decoding {policy}", build)
        except IntegrityError:
            await self._source.abandon(leg.manifest.object_root)  # else the next try would meet the same bytes
            raise
        if self._drain.called:
            return
        installed = self._engine.installed
        await self._stock.tidy(installed)
        if course.arrive() and (installed is None or policy > installed):
            await self._switch(policy)

    async def _bring(self, course: Course, leg: Leg) -> Path | None:
        """The object's file; None when a newer way does without it, or the worker drains."""
        given_up = Recall()
        fetch = given_up.within(None, "an object", self._source.bring(leg.signed, leg.manifest))
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen(course, given_up), name="newer ways")
                path = await self._drain.within(FETCH_LIMIT_S, f"the object of {leg.manifest.policy}", fetch)
                listening.cancel()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors
        if given_up.called:
            self._events.emit("way_changed", given_up=str(leg.manifest.policy), newest=str(course.newest))
            await self._source.abandon(leg.manifest.object_root)
            return None  # Even if it came in that very moment: the course has another next leg.
        return path

    async def _listen(self, course: Course, given_up: Recall) -> None:
        """Consumes news while an object is under way; ends with it, or when the newest way does without it."""
        while True:
            asked_s = self._clock.monotonic()
            news = await self._ask(course.newest)
            if news.path and not course.turn(self._way(news), self._source.received(), news.gone):
                return given_up.call()
            await space_out(asked_s, self._clock, self._drain)

    def _way(self, news: PolicyNews) -> list[Leg]:
        """The path that was told, once it was checked. Raises IntegrityError."""
        way = [Leg(self._terms.open(signed), signed) for signed in news.path]
        goal, installed = way[-1].manifest.policy, self._engine.installed
        if installed is not None and goal <= installed:
            raise IntegrityError(f"snapshot {goal} must be newer than the installed {installed}")
        for leg in way:
            policy, run_id, dtype = leg.manifest.policy, leg.manifest.run_id, leg.manifest.dtype
            if run_id != self._terms.run_id:
                raise IntegrityError(f"snapshot {policy} must be of run {self._terms.run_id}, not of {run_id}")
            if dtype != self._terms.dtype:
                raise IntegrityError(f"snapshot {policy} must hold {self._terms.dtype}, it holds {dtype}")
        return way

    async def _switch(self, policy: Policy) -> None:
        """Load a held snapshot aside and make it the engine's."""
        slowly = " by starting the server anew" if self._engine.capabilities.restarts else ""
        self.activity = f"installing {policy}{slowly}"
        load = self._engine.prefetch(policy, self._stock.folder(policy))
        await self._drain.within(ENGINE_LIMIT_S, f"loading {policy}", load)
        if self._drain.called:
            return
        if self._engine.installed is None:
            # Nothing runs yet, and a server may take minutes to start: a drain need not wait for it.
            await self._drain.within(ENGINE_LIMIT_S, f"a start with {policy}", self._engine.activate(policy))
            if self._engine.installed is None:
                return
        else:
            await self._replace(policy)
        self._events.emit("installed", policy=str(policy))
        self.activity = ""
        self._on_install()
        await self._source.forget_before(policy)

    async def _replace(self, policy: Policy) -> None:
        """Not recalled by a drain: an engine between two policies would be worse than a late exit."""
        try:
            async with asyncio.timeout(ENGINE_LIMIT_S):
                await self._engine.activate(policy)
        except TimeoutError as error:
            raise EngineError(f"{policy} was not active after {ENGINE_LIMIT_S:g} s") from error
