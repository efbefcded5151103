"""How a worker comes to run a newer policy.

Invariant: the engine's own word is the only version there is (I5); a snapshot is switched to only after its signature,
run, element type, order and bytes were checked (I6), and any failure leaves the old policy serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.signing import open_signed
from echo2.errors import DiskFull, EngineError, IntegrityError, Refused, Starved, TransportError, Unauthorised
from echo2.ports import Clock, EventLog, SnapshotSource
from echo2.rollout.engine import Engine
from echo2.transport.messages import MAX_WAIT_S, AwaitPolicy, PolicyNews
from echo2.transport.patience import Backoff, Line, Recall, space_out

FETCH_LIMIT_S = 6 * 3600.0
"""Whole download of one snapshot; the transport bounds each part of it far more tightly."""
ENGINE_LIMIT_S = 3600.0
"""Loading and activating a snapshot, running generations awaited."""


class SnapshotTerms(msgspec.Struct, frozen=True):
    """What every snapshot of the run must satisfy, and where it goes."""

    run_id: str
    public_key: bytes
    """Ed25519 key of the run's manifests."""
    dtype: str
    """Element type that every snapshot must declare (field report E12)."""
    folder: Path
    """Where fetched snapshots are put."""


class Installer:
    def __init__(
        self,
        line: Line,
        source: SnapshotSource,
        engine: Engine,
        drain: Recall,
        clock: Clock,
        events: EventLog,
        jitter: Random,
        terms: SnapshotTerms,
        on_install: Callable[[], None],
    ) -> None:
        self._line = line
        self._source = source
        self._engine = engine
        self._drain = drain
        self._clock = clock
        self._events = events
        self._jitter = jitter
        self._terms = terms
        self._on_install = on_install
        self.activity = ""
        """What is going on, for people; empty when nothing is."""

    async def run(self) -> None:
        """Consumes news of policies; waits for one newer than ours; produces the installed policy; ends by drain."""
        backoff = Backoff(self._jitter, first_s=1.0)
        while not self._drain.called:
            asked_s = self._clock.monotonic()
            ask = self._line.call(AwaitPolicy(self._engine.installed, MAX_WAIT_S), PolicyNews)
            news = await self._drain.within(None, "news of a policy", ask)
            if news is None or news.manifest is None:
                await space_out(asked_s, self._clock, self._drain)
                continue
            try:
                await self._install(open_signed(news.manifest, self._terms.public_key))
                backoff.reset()
            except Unauthorised:
                raise
            except (IntegrityError, EngineError, TransportError, Refused, Starved, DiskFull, OSError) as error:
                # The old policy keeps serving; the next try asks for whatever is newest by then.
                self._events.emit("install_failed", policy=str(news.current), error=str(error))
                self.activity = f"waiting: could not install {news.current}: {error}"
                await self._drain.pause(backoff.next_s())

    async def _install(self, manifest: Manifest) -> None:
        """Bring, load aside, switch. Raises IntegrityError for a snapshot that is not what this worker must run."""
        policy = manifest.policy
        self._check(manifest)
        self.activity = f"installing {policy}"
        fetch = self._source.fetch(manifest, self._terms.folder)
        folder = await self._drain.within(FETCH_LIMIT_S, f"the download of {policy}", fetch)
        if folder is None:
            return
        await self._drain.within(ENGINE_LIMIT_S, f"loading {policy}", self._engine.prefetch(policy, folder))
        if self._drain.called:
            return
        try:
            # Not recalled by a drain: an engine between two policies would be worse than a late exit.
            async with asyncio.timeout(ENGINE_LIMIT_S):
                await self._engine.activate(policy)
        except TimeoutError as error:
            raise EngineError(f"{policy} was not active after {ENGINE_LIMIT_S:g} s") from error
        self._events.emit("installed", policy=str(policy))
        self.activity = ""
        self._on_install()

    def _check(self, manifest: Manifest) -> None:
        policy, installed = manifest.policy, self._engine.installed
        if manifest.run_id != self._terms.run_id:
            raise IntegrityError(f"snapshot {policy} must be of run {self._terms.run_id}, not of {manifest.run_id}")
        if installed is not None and policy <= installed:
            raise IntegrityError(f"snapshot {policy} must be newer than the installed {installed}")
        if manifest.dtype != self._terms.dtype:
            raise IntegrityError(f"snapshot {policy} must hold {self._terms.dtype}, it holds {manifest.dtype}")
