"""A worker: leases prompts, generates groups, submits them, installs new policies.

Invariant: a finished group is in the spool before it is on the wire and leaves it only for an answer; the version told
to the coordinator is the one the engine confirmed (I5); no lease is asked for before something is installed.

    GREETING ──Hello──▶ INSTALLING ──first policy active──▶ WORKING ──drain──▶ DRAINING ──Leave──▶ GONE

| loop       | consumes            | waits for                 | unblocked by              | produces                |
|------------|---------------------|---------------------------|---------------------------|-------------------------|
| installs   | news of policies    | a policy newer than ours  | a publish, drain          | the installed policy    |
| lane (× n) | leases              | a lease; then its episode | the lease gate, drain     | one submitted group     |
| backlog    | the spool at start  | verdicts                  | the coordinator           | an empty spool          |
| heartbeats | what the others do  | the next beat             | time, an install, the end | drain and revoke orders |
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from random import Random

import msgspec

from echo2.data.chat import ChatFormat
from echo2.data.task import Task
from echo2.errors import EngineError, Refused, Starved, TransportError, Unauthorised, first_cause
from echo2.ports import Clock, EventLog, SnapshotSource, SnapshotStock, Spool, Transport
from echo2.rollout.engine import Engine
from echo2.rollout.episode import Judged, judged_here, run_group
from echo2.transport.messages import (
    MAX_WAIT_S,
    Done,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LeaseGrant,
    LeaseWait,
    Leave,
    RequestLease,
    RowSubmission,
    SubmitGroup,
    Welcome,
)
from echo2.transport.patience import Backoff, Line, Recall, space_out
from echo2.types import RowStatus, Trajectory
from echo2.worker.installer import Installer, SnapshotTerms
from echo2.worker.outbox import Outbox
from echo2.worker.pulse import Pulse, SteadyPulse
from echo2.worker.residence import Residence, ResidentEngine

EPISODE_MARGIN_S = 30.0
"""Beyond a lease's own time-out, before a group that does not come back is reported as timed out."""

_records = msgspec.msgpack.Decoder(Trajectory)


class Phase(StrEnum):
    GREETING = "greeting"
    INSTALLING = "installing"
    WORKING = "working"
    DRAINING = "draining"
    GONE = "gone"


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    snapshots: SnapshotTerms
    heartbeat_s: float
    concurrent_groups: int
    orphan_after_s: float
    """Silence of the coordinator after which the worker shuts itself down."""
    thinking: bool = False
    jitter_seed: int = 0
    poll_s: float = MAX_WAIT_S
    """How long the coordinator may hold a question for a lease, or for news while no object is under way."""


class Worker:
    def __init__(
        self,
        transport: Transport,
        source: SnapshotSource | None,
        stock: SnapshotStock | None,
        engine: Engine,
        tasks: Mapping[str, Task],
        chat: ChatFormat,
        spool: Spool,
        clock: Clock,
        events: EventLog,
        options: WorkerOptions,
        pulse: Pulse | None = None,
        judged: Judged = judged_here,
        resident: ResidentEngine | None = None,
    ) -> None:
        """pulse: None for a steady one of the options' heartbeat. judged: where tasks score replies.
        resident: the engine, where whoever owns its weights switches them; then source and stock are None."""
        self._judged = judged
        self._engine = engine
        self._tasks = tasks
        self._chat = chat
        self._clock = clock
        self._events = events
        self._options = options
        self._jitter = Random(options.jitter_seed)
        self._line = Line(transport, clock, events, self._jitter, options.orphan_after_s)
        self._drain = Recall()
        self._installer: Installer | Residence
        if resident is not None:
            self._installer = Residence(resident, self._drain, events, self._on_install)
        else:
            assert source is not None, "only a resident engine brings nothing"
            assert stock is not None, "only a resident engine brings nothing"
            self._installer = Installer(
                self._line, source, stock, engine, self._drain, clock, events, self._jitter, options.snapshots,
                self._on_install, options.poll_s,
            )  # fmt: skip
        self._outbox = Outbox(self._line, spool, self._drain, events, options.orphan_after_s)
        self._finished = False
        self._pulse = pulse or SteadyPulse(options.heartbeat_s, self._jitter)
        self._first_install = asyncio.Event()
        self._running: dict[str, Recall] = {}
        self._tokens = 0
        self._activity = ""
        self._mending = False
        self.phase = Phase.GREETING

    def drain(self, reason: str) -> None:
        """Take no new leases, finish and submit the running ones, leave."""
        if not self._drain.called:
            self._events.emit("draining", reason=reason)
            self.phase = Phase.DRAINING
            self._drain.call()
            self._pulse.hurry()

    async def run(self) -> None:
        """Work until drained.

        Raises Unauthorised or Refused when the coordinator does not want this worker, Starved when it fell silent;
        finished groups stay in the spool.
        """
        try:
            await self._drain.within(None, "the coordinator's welcome", self._greet())
            if self._drain.called:
                return
            self.phase = Phase.INSTALLING
            async with asyncio.TaskGroup() as life:
                life.create_task(self._heartbeats(), name="heartbeats")
                async with asyncio.TaskGroup() as work:
                    work.create_task(self._installer.run(), name="installs")
                    work.create_task(self._outbox.run(), name="backlog")
                    for lane in range(self._options.concurrent_groups):
                        work.create_task(self._lane(), name=f"lane {lane}")
                self._finished = True
                self._pulse.hurry()
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        await self._leave()
        self.phase = Phase.GONE

    # ---- greeting and leaving ----------------------------------------------------------------------------------

    async def _greet(self) -> None:
        await self._outbox.recover()
        welcome = await self._line.call(self._hello(), Welcome)
        run_id = self._options.snapshots.run_id
        if welcome.run_id != run_id:
            raise Refused(
                f"this worker belongs to run {run_id} and the coordinator runs {welcome.run_id}; "
                "join with that run's join string in an empty folder"
            )
        self._events.emit("joined", run_id=welcome.run_id, held=len(self._held_leases()))

    def _hello(self) -> Hello:
        fingerprints = {name: task.fingerprint() for name, task in self._tasks.items()}
        return Hello(self._held_leases(), fingerprints)

    async def _leave(self) -> None:
        try:
            await self._line.once(Leave(), Done)
        except (TransportError, Refused) as error:
            # Leaving is a courtesy: silence tells the coordinator the same, later.
            self._events.emit("left_unheard", error=str(error))
        else:
            self._events.emit("left")

    def _held_leases(self) -> tuple[str, ...]:
        return (*self._outbox.backlog, *self._running)

    def _on_install(self) -> None:
        if self.phase is Phase.INSTALLING:
            self.phase = Phase.WORKING
        self._first_install.set()
        if isinstance(self._installer, Residence):
            self._pulse.hurry()  # An installer tells by its next question.

    # ---- leases ------------------------------------------------------------------------------------------------

    async def _lane(self) -> None:
        # No deadline of its own: the installs loop bounds every try and the line bounds the coordinator's silence.
        await self._drain.within(None, "a first policy", self._first_install.wait())
        backoff, ailing = Backoff(self._jitter), Backoff(self._jitter)
        while not self._drain.called:
            installed = self._engine.installed
            assert installed is not None, "a lane runs only after the first install"
            if (fault := self._engine.fault) is not None:  # a lease taken now would only fail
                self._events.emit("engine_unwell", error=fault)
                self._activity = f"waiting: {fault}"
                await self._drain.pause(ailing.next_s())
                await self._mend()
                continue
            asked_s = self._clock.monotonic()
            ask = self._line.call(RequestLease(installed, self._options.poll_s), LeaseGrant, LeaseWait)
            try:
                reply = await self._drain.within(None, "a lease", ask)
            except Unauthorised:
                raise
            except Refused as error:
                self._events.emit("lease_refused", error=str(error))
                self._activity = f"waiting: {error}"
                await self._drain.pause(backoff.next_s())
                continue
            backoff.reset()
            if isinstance(reply, LeaseGrant):
                if await self._serve(reply):
                    ailing.reset()
                else:  # a machine on which nothing succeeds must not run through the prompts
                    await self._drain.pause(ailing.next_s())
            elif isinstance(reply, LeaseWait):
                self._activity = f"waiting: {reply.reason}"
                await space_out(asked_s, self._clock, self._drain)

    async def _mend(self) -> None:
        """One lane at a time has the engine try; the others look again later."""
        if self._mending:
            return
        self._mending = True
        try:
            await self._drain.within(None, "the engine", self._engine.mend())
        except EngineError as error:
            self._events.emit("engine_not_mended", error=str(error))
        finally:
            self._mending = False

    async def _serve(self, lease: LeaseGrant) -> bool:
        """Whether some row of it ended otherwise than in an error."""
        self._activity = "generating"
        recall = self._running[lease.lease_id] = Recall()
        try:
            rows = await self._generate(lease, recall)
            if rows is None:
                self._events.emit("lease_revoked", lease=lease.lease_id)
                return True
            group = SubmitGroup(lease.lease_id, lease.group_id, lease.attempt, rows)
            await self._outbox.send(group)
            return any(row.status is not RowStatus.ERROR for row in rows)
        finally:
            del self._running[lease.lease_id]

    async def _generate(self, lease: LeaseGrant, recall: Recall) -> tuple[RowSubmission, ...] | None:
        """The group's rows, failures as statuses (I4); None when the coordinator took the lease back."""
        task = self._tasks.get(lease.prompt.task)
        if task is None:
            return _failed(lease, RowStatus.ERROR, f"this worker has no task named {lease.prompt.task}")
        episode = run_group(self._engine, task, self._chat, lease, self._options.thinking, self._clock, self._judged)
        try:
            rows = await recall.within(lease.timeout_s + EPISODE_MARGIN_S, "the group", episode)
        except Starved as error:
            return _failed(lease, RowStatus.TIMEOUT, str(error))
        for row in rows or ():
            if row.status is RowStatus.FINISHED:
                self._tokens += _records.decode(row.record).sampled_tokens
        return rows

    # ---- heartbeats --------------------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        started_s = self._clock.monotonic()
        while not self._finished:
            try:
                await self._beat()
            except TransportError as error:
                self._events.emit("heartbeat_lost", error=str(error))
                self._line.lose_patience(error, started_s)
            self._line.heard(await self._pulse.wait())

    async def _beat(self) -> None:
        activity = self._installer.activity or self._activity
        state = activity if activity and not self._drain.called else self.phase.value
        beat = Heartbeat(self._engine.installed, self._held_leases(), self._tokens, len(self._outbox.backlog), state)
        try:
            reply = await self._line.once(beat, HeartbeatReply)
        except Unauthorised:
            raise
        except Refused as error:
            # A coordinator that does not know this worker any more is told again what it holds.
            self._events.emit("heartbeat_refused", error=str(error))
            await self._line.once(self._hello(), Welcome)
            return
        if reply.drain:
            self.drain("the coordinator asked for it")
        for lease_id in reply.revoked_leases:
            if lease_id in self._running:
                self._running[lease_id].call()


def _failed(lease: LeaseGrant, status: RowStatus, error: str) -> tuple[RowSubmission, ...]:
    return tuple(RowSubmission(index, status, error) for index in lease.indices)
