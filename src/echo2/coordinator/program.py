"""The coordinator as a program: takes messages, answers when the answer is durable, and watches the time.

    worker ──RequestLease──▶ gate ──▶ lease           ─┐
    worker ──SubmitGroup───▶ admission ──▶ verdicts     ├─▶ store (one commit) ──▶ answer
    learner ─RequestBatch──▶ buffer ──▶ batch t         │
    learner ─ReportStep────▶ rows trained, metrics line ─┘
    learner ─PublishSnapshot▶ shelf verifies, signs ──▶ workers hear of it

Invariant: no answer leaves before everything it rests on is durable (I3), and every wait here has a deadline (I7).

Loops, all in one task group:
    watch     consumes time; waits for a heartbeat period; unblocked by the clock; produces lost leases, a reopened
              gate, and the sentence that ends a starved run
    requests  (one task each, made by the shell) consume a message; wait at most ``MAX_WAIT_S``; unblocked by a change
              of gate, buffer or history; produce one reply
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

import msgspec

from echo2.broadcast.parse import parse_manifest
from echo2.broadcast.shelf import Shelf
from echo2.broadcast.signing import open_signed
from echo2.config.root import Config
from echo2.coordinator.books import Books
from echo2.coordinator.ending import Ending
from echo2.coordinator.enrolment import Registry, check_tasks
from echo2.coordinator.learner_desk import LearnerDesk
from echo2.coordinator.lines import Lines, newest
from echo2.coordinator.operations import Loaded, Operation
from echo2.coordinator.status import exposition, run_status
from echo2.coordinator.wakeup import LeaseQueue, Wakeup
from echo2.coordinator.watchdog import Progress, starved
from echo2.coordinator.worker_desk import WorkerDesk
from echo2.data.cursor import PromptCursor
from echo2.data.groups import Batch
from echo2.errors import Refused, Starved
from echo2.metrics import StepMetrics
from echo2.ports import Clock, EventLog, Ids, Store
from echo2.report.transcripts import choose
from echo2.transport import messages as m
from echo2.types import Policy, Verdict
from echo2.version import VERSION

BARREN = ", and the last leases ended without an accepted trajectory: look at the workers' logs"


class Coordinator:
    """Implements the ``Service`` that the HTTP surface and the simulator's transport speak to."""

    def __init__(
        self,
        config: Config,
        store: Store,
        loaded: Loaded,
        shelf: Shelf,
        prompts: PromptCursor,
        clock: Clock,
        ids: Ids,
        events: EventLog,
        lines: Lines,
        *,
        run_id: str,
        snapshot_public_key: bytes = b"",
        task_fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.shelf = shelf
        self.clock = clock
        self.ids = ids
        self.events = events
        self.lines = lines
        self.snapshot_public_key = snapshot_public_key
        self.task_fingerprints = dict(task_fingerprints or {})
        self.books = Books(config, loaded, run_id, prompts, ids, events)
        self.workers = WorkerDesk(self.books)
        self.learner = LearnerDesk(self.books)
        self.registry = Registry(loaded.tokens, loaded.peers)
        self.done = asyncio.Event()
        """The run has ended in order."""
        self.last_metrics: StepMetrics | None = newest(loaded)
        if self.last_metrics is not None:
            self.books.scoreboard.resume(self.last_metrics)
        self._gate = Wakeup()
        self._ready = Wakeup()
        self._news = Wakeup()
        self._queue = LeaseQueue()
        self._wait_reason = ""
        self._rows_at = self._learner_at = clock.monotonic()
        self._ending = Ending(self.books)
        self._problem: Exception | None = None
        self._commits = 0
        self._unshown: deque[tuple[int, list[Operation]]] = deque()
        self.books.resume_leases(clock.monotonic())

    # ---- surface ------------------------------------------------------------------------------------------------

    async def enrol(self, request: m.Enrol) -> m.Enrolled:
        """Exchange a join token for a credential. Raises Unauthorised or Refused."""
        peer, credential, operations = self.registry.enrol(request, self.ids, self.clock.wall(), VERSION)
        for operation in operations:
            self.books.record(operation)
        await self._durable()
        self.events.emit("enrolled", peer=peer.peer_id, name=peer.name, role=peer.role.value)
        return m.Enrolled(peer.peer_id, credential, peer.role, self.books.state.run_id, self.snapshot_public_key)

    def authenticate(self, credential: str) -> m.Principal:
        return self.registry.authenticate(credential)

    async def handle(self, principal: m.Principal, request: m.Request) -> m.Reply:
        """Answer one message. Raises Refused or Fenced with the reason."""
        if principal.role not in m.ROLES_OF.get(type(request), frozenset()):
            raise Refused(f"a {principal.role} may not send {type(request).__name__}")
        if principal.role is m.Role.WORKER and not isinstance(request, m.GetStatus):
            self.workers.seen(principal.peer_id, self.registry.name_of(principal.peer_id), self.clock.monotonic())
        elif principal.role is m.Role.LEARNER:
            self._learner_at = self.clock.monotonic()
            self.learner.heard(getattr(request, "epoch", 0), self._learner_at)
        answer: Callable[[str, Any], Awaitable[m.Reply]] = self._ANSWERS[type(request)].__get__(self)
        reply = await answer(principal.peer_id, request)
        await self._durable()
        return reply

    async def _durable(self) -> None:
        """Return when everything decided so far is durable; then show it.

        A caller may be cancelled in here when its client is gone: its operations are committed all the same, and the
        next caller shows them, since a later commit is durable only after an earlier one.
        """
        operations = self.books.drain()
        if operations:
            self._commits += 1
            self._unshown.append((self._commits, operations))
        number = self._commits
        try:
            await self.store.commit(operations)
        except Exception as error:
            # Memory is now ahead of the disk: going on could acknowledge what a restart forgets.
            self._problem = error
            raise
        while self._unshown and self._unshown[0][0] <= number:
            self.lines.show(self._unshown.popleft()[1])

    # ---- workers ------------------------------------------------------------------------------------------------

    async def _hello(self, worker_id: str, request: m.Hello) -> m.Reply:
        check_tasks(self.task_fingerprints, request.task_fingerprints)
        self.workers.hello(worker_id, request.held_leases, self.clock.monotonic())
        self._pump()
        return m.Welcome(
            run_id=self.books.state.run_id,
            config_json=self.config.model_dump_json(),
            assets=self.books.assets,
            heartbeat_s=self.config.coordinator.heartbeat_s,
            current=self.books.state.current,
        )

    async def _await_policy(self, worker_id: str, request: m.AwaitPolicy) -> m.Reply:
        deadline = self.clock.monotonic() + _bounded(request.wait_s)
        while not self._is_news(request.after):
            if not await self._news.wait(deadline - self.clock.monotonic()):
                return m.PolicyNews(self.books.state.current, None)
        current = self.books.state.current
        assert current is not None
        return m.PolicyNews(current, await self.shelf.signed_manifest(current))

    def _is_news(self, after: Policy | None) -> bool:
        current = self.books.state.current
        return current is not None and (after is None or current > after)

    async def _lease(self, worker_id: str, request: m.RequestLease) -> m.Reply:
        now = self.clock.monotonic()
        waiter = self._queue.put(worker_id, request.installed)
        self._pump()
        try:
            async with asyncio.timeout(_bounded(request.wait_s)):
                return await waiter
        except TimeoutError:
            # The grant may have come in the very moment in which the time ended.
            return waiter.result() if waiter.done() and not waiter.cancelled() else m.LeaseWait(self._wait_reason)
        except asyncio.CancelledError:
            granted = waiter.result() if waiter.done() and not waiter.cancelled() else None
            if isinstance(granted, m.LeaseGrant):
                self.workers.return_lease(granted, self.clock.monotonic())  # Its client is gone.
            raise
        finally:
            # One of the worker's lease loops was held back so long; that says nothing about its rate.
            held_s = (self.clock.monotonic() - now) / self.config.rollout.concurrent_groups
            self.books.fleet.held(worker_id, held_s)
            self._queue.forget(waiter)

    def _pump(self) -> None:
        """Grant what the gate lets through now; tell the learner's wait, too, that something changed."""
        now = self.clock.monotonic()
        for version in self._queue.versions():
            while (first := self._queue.first(version)) is not None:
                worker_id, waiter = first
                granted = self.workers.lease(worker_id, version, now)
                if isinstance(granted, str):
                    self._wait_reason = granted
                    break
                waiter.set_result(granted)
                if not self.workers.fruitless:
                    self._rows_at = now
        self._ready.notify()

    async def _submit(self, worker_id: str, request: m.SubmitGroup) -> m.Reply:
        now = self.clock.monotonic()
        verdicts = self.workers.submit(worker_id, request, now)
        if Verdict.ACCEPTED in verdicts:
            self._rows_at = now
        self._pump()
        return m.SubmitVerdicts(tuple(verdicts))

    async def _heartbeat(self, worker_id: str, request: m.Heartbeat) -> m.Reply:
        reply = self.workers.heartbeat(worker_id, request, self.clock.monotonic())
        if request.installed is not None:
            self._queue.send_back(worker_id, request.installed)
        self._pump()
        return reply

    async def _leave(self, peer_id: str, request: m.Leave) -> m.Reply:
        if peer_id in self.books.fleet.workers:
            self.workers.leave(peer_id, self.clock.monotonic())
        else:
            self.learner.leave(request.epoch, self.clock.monotonic())
        self._pump()
        return m.Done()

    # ---- learner ------------------------------------------------------------------------------------------------

    async def _attach(self, peer_id: str, request: m.Attach) -> m.Reply:
        missing = await self.shelf.missing_assets(request.assets)
        attached = self.learner.attach(request, missing, self.clock.monotonic())
        self._pump()
        return attached

    async def _batch(self, peer_id: str, request: m.RequestBatch) -> m.Reply:
        """Consumes a request; waits for P closed groups; unblocked by submissions and time; produces batch t."""
        start = self.clock.monotonic()
        deadline = start + _bounded(request.wait_s)
        found: Batch | str = ""
        try:
            while isinstance(found := self.learner.batch(request.epoch, request.step, self.clock.monotonic()), str):
                if self.books.stop_reason:
                    return m.BatchWait(self.books.stop_reason, stop=True)
                if not self.books.learner_waits:
                    self.books.learner_waits = True  # The gate now reaches S steps ahead.
                    self._pump()
                    continue
                if not await self._ready.wait(deadline - self.clock.monotonic()):
                    return m.BatchWait(found)
        finally:
            if isinstance(found, Batch) or self.books.stop_reason:
                self.books.learner_waits = False
        self._rows_at = self.clock.monotonic()
        self._pump()
        await self._durable()
        records = await self.store.payloads(found.rows)
        rows = tuple(
            m.BatchRow(group_id, index, msgspec.Raw(record))
            for (group_id, index, _), record in zip(found.rows, records, strict=True)
        )
        return m.BatchReply(found.step, found.digest, rows)

    async def _report(self, peer_id: str, request: m.ReportStep) -> m.Reply:
        accepted, line = self.learner.report(request, self.clock.monotonic(), self.clock.wall())
        self.last_metrics = line or self.last_metrics
        if accepted.stop:
            self.books.request_stop("the last step is trained")
        self._pump()
        if line is not None:
            await self._durable()
            await self._transcribe(request.step)
        return accepted

    async def _transcribe(self, step: int) -> None:
        """Keep a few of the batch's trajectories readable, while their records are still there."""
        rows = self.books.buffer.batch_rows(self.books.buffer.batches[step])
        chosen = choose([row.reward or 0.0 for row in rows], self.config.metrics.transcripts_per_step)
        self.lines.transcribe(step, await self.store.payloads([rows[index].key for index in chosen]))

    async def _ack_checkpoint(self, peer_id: str, request: m.AckCheckpoint) -> m.Reply:
        self.learner.ack_checkpoint(request.epoch, request.step)
        return m.Done()

    async def _offer(self, peer_id: str, request: m.OfferSnapshot) -> m.Reply:
        manifest = parse_manifest(request.manifest)
        self.learner.check_offer(request.epoch, manifest)
        return m.SnapshotOffer(await self.shelf.offer(manifest))

    async def _publish(self, peer_id: str, request: m.PublishSnapshot) -> m.Reply:
        self.learner.check_publish(request.epoch, request.policy)
        signed = await self.shelf.finish(request.policy)
        self.learner.check_publish(request.epoch, request.policy)  # A newer learner may have attached meanwhile.
        size = open_signed(signed, self.snapshot_public_key).object_size
        self.learner.published(request.policy, size, self.clock.monotonic())
        await self._durable()
        self._rows_at = self.clock.monotonic()
        self._pump()
        self._news.notify()
        await self.shelf.prune(self.books.kept_policies())
        return m.Done()

    # ---- people -------------------------------------------------------------------------------------------------

    async def _status(self, peer_id: str, request: m.GetStatus) -> m.Reply:
        return self.status()

    async def _stop(self, peer_id: str, request: m.StopRun) -> m.Reply:
        self.books.request_stop(request.reason or "stopped by the operator")
        self._pump()
        return m.Done()

    def status(self) -> m.RunStatus:
        waits = self._wait_reason if self._queue.versions() else ""
        return run_status(self.books, self.last_metrics, self.clock.monotonic(), waits)

    def prometheus(self) -> bytes:
        return exposition(self.status(), self.last_metrics, self.books)

    # ---- time ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch until the run has ended in order. Raises Starved when nobody makes progress any more."""
        await self._durable()
        while not self.done.is_set():
            due = self.clock.monotonic() + self.config.coordinator.heartbeat_s
            await asyncio.sleep(self.config.coordinator.heartbeat_s)
            if self._problem is not None:
                raise self._problem
            now = self.clock.monotonic()
            self._excuse(now - due, now)
            self.workers.tick(now)
            self._watch_progress(now)
            if self._ending.advance(now):
                self.done.set()
            self._pump()
            await self._durable()

    def _excuse(self, late_s: float, now: float) -> None:
        """A pause of this very process (SIGSTOP, a starved machine) is nobody else's silence (H05)."""
        if late_s > self.config.coordinator.heartbeat_s:
            self.books.fleet.excuse(late_s, now)
            self._rows_at = min(now, self._rows_at + late_s)
            self._learner_at = min(now, self._learner_at + late_s)
            self.events.emit("stood_still", seconds=round(late_s, 3))

    def _watch_progress(self, now: float) -> None:
        books = self.books
        if books.stop_reason:
            return
        progress = Progress(
            rows_s=now - self._rows_at,
            learner_s=now - self._learner_at,
            learner_attached=books.learner_attached,
            learner_waits=books.learner_waits,
            published=books.state.current is not None,
            workers_active=len(books.fleet.active()),
            batch=self.learner.lacking() + (BARREN if self.workers.fruitless else ""),
            t_train_s=books.scoreboard.t_train_s,
        )
        sentence = starved(progress, self.config.coordinator.stall_s)
        if sentence is not None:
            self.events.emit("starved", why=sentence)
            raise Starved(sentence)

    _ANSWERS: ClassVar[dict[type[m.Request], Any]] = {
        m.Hello: _hello,
        m.AwaitPolicy: _await_policy,
        m.RequestLease: _lease,
        m.SubmitGroup: _submit,
        m.Heartbeat: _heartbeat,
        m.Leave: _leave,
        m.Attach: _attach,
        m.RequestBatch: _batch,
        m.ReportStep: _report,
        m.AckCheckpoint: _ack_checkpoint,
        m.OfferSnapshot: _offer,
        m.PublishSnapshot: _publish,
        m.GetStatus: _status,
        m.StopRun: _stop,
    }


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, 0.0), m.MAX_WAIT_S)
