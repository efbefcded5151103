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
    provide   consumes time and what pools say (``provisioning.drive``); waits for a decision period; unblocked by a
              worker that went away or the run's end; produces machines that start and machines that are given back
    rescoring consumes claims; waits for one; unblocked by a submission; produces workers that are set aside
    anchors   consumes publishes; waits for one after which an anchor is due; unblocked by a publish; produces anchors
    requests  (one task each, made by the shell) consume a message; wait at most ``MAX_WAIT_S``; unblocked by a change
              of gate, buffer or history; produce one reply
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from echo2.broadcast.shelf import Shelf
from echo2.config.root import Config
from echo2.coordinator.anchors import keep_anchors
from echo2.coordinator.benches import FleetBenches
from echo2.coordinator.books import Books
from echo2.coordinator.ending import Ending
from echo2.coordinator.enrolment import Registry
from echo2.coordinator.hall import Hall
from echo2.coordinator.invitations import Invitations
from echo2.coordinator.learner_answers import LearnerAnswers
from echo2.coordinator.lines import Lines, newest
from echo2.coordinator.operations import Loaded
from echo2.coordinator.pools import no_pools
from echo2.coordinator.providing import Provided, rules_of
from echo2.coordinator.relays import Standings, no_relays
from echo2.coordinator.rescoring import Scorer, keep_rescoring
from echo2.coordinator.status import exposition, run_status
from echo2.coordinator.watchdog import Progress, starved
from echo2.coordinator.worker_answers import WorkerAnswers
from echo2.data.cursor import PromptCursor
from echo2.errors import Refused, Starved, first_cause
from echo2.metrics import StepMetrics
from echo2.ports import Clock, EventLog, Ids, Seed, Store
from echo2.provisioning.drive import drive
from echo2.provisioning.pools.pool import Pool
from echo2.provisioning.pools.standby import Benches
from echo2.transport import messages as m
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
        seed: Seed,
        *,
        run_id: str,
        snapshot_public_key: bytes = b"",
        task_fingerprints: Mapping[str, str] | None = None,
        relays: Standings = no_relays,
        pools: Callable[[Invitations, Benches], Sequence[Pool]] = no_pools,
        longest_wait_s: float = m.MAX_WAIT_S,
        scorer: Scorer | None = None,
    ) -> None:
        """longest_wait_s: for which a question may be held; what connections survive. scorer: None scores no reward
        again."""
        self.config = config
        self.shelf = shelf
        self.clock = clock
        self.ids = ids
        self.events = events
        self.books = Books(config, loaded, run_id, prompts, ids, events)
        self.books.begin(clock.monotonic(), clock.wall())
        self._scorer = scorer
        if scorer is None:
            self.books.docket.close()
        self.hall = Hall(self.books, store, shelf, seed, clock, lines, longest_wait_s)
        self.registry = Registry(loaded.tokens, loaded.peers)
        self.snapshot_public_key = snapshot_public_key
        self._relays = relays
        self.done = asyncio.Event()
        """The run has ended in order."""
        self.invitations = Invitations(self.registry, self.hall, config.provisioning.start_s)
        self._pools = pools(self.invitations, FleetBenches(self.hall))
        self._rules = rules_of(config)
        self._provided = Provided(self.hall, self.done)
        self._dismissals = 0
        self._to_workers = WorkerAnswers(self.hall, task_fingerprints or {})
        self._to_learner = LearnerAnswers(self.hall, newest(loaded))
        if self._to_learner.last_metrics is not None:
            self.books.scoreboard.resume(self._to_learner.last_metrics)
            self.books.resume_bill(self._to_learner.last_metrics.cost_usd_by_name)
        self._ending = Ending(self.books)
        self._answers = self._answer_of()
        self.hall.workers.resume(self.registry.peer, clock.monotonic())

    # ---- surface ------------------------------------------------------------------------------------------------

    async def enrol(self, request: m.Enrol) -> m.Enrolled:
        """Exchange a join token for a credential. Raises Unauthorised or Refused."""
        peer, credential, operations = self.registry.enrol(request, self.ids, self.clock.wall(), VERSION)
        for operation in operations:
            self.books.record(operation)
        await self.hall.durable()
        self.events.emit("enrolled", peer=peer.peer_id, name=peer.name, role=peer.role.value)
        return m.Enrolled(peer.peer_id, credential, peer.role, self.books.state.run_id, self.snapshot_public_key)

    def authenticate(self, credential: str) -> m.Principal:
        """Raises Unauthorised, SetAside."""
        principal = self.registry.authenticate(credential)
        self.books.outcasts.check(principal.peer_id)
        return principal

    async def handle(self, principal: m.Principal, request: m.Request) -> m.Reply:
        """Answer one message. Raises Refused, SetAside or Fenced with the reason."""
        self.books.outcasts.check(principal.peer_id)
        if principal.role not in m.ROLES_OF.get(type(request), frozenset()):
            raise Refused(f"a {principal.role} may not send {type(request).__name__}")
        if principal.role is m.Role.WORKER and not isinstance(request, m.GetStatus):
            self.hall.workers.seen(self.registry.peer(principal.peer_id), self.clock.monotonic())
        elif principal.role is m.Role.LEARNER:
            self.hall.learner_at = self.clock.monotonic()
            self.hall.learner.heard(getattr(request, "epoch", 0), self.hall.learner_at)
        reply = await self._answers[type(request)](principal.peer_id, request)
        await self.hall.durable()
        return reply

    async def _leave(self, peer_id: str, request: m.Leave) -> m.Reply:
        if peer_id in self.books.fleet.workers:
            self.hall.workers.leave(peer_id, self.hall.clock.monotonic())
        else:
            self.hall.learner.leave(request.epoch, self.hall.clock.monotonic())
        self.hall.pump()
        self._tell_dismissals()
        return m.Done()

    def _tell_dismissals(self) -> None:
        """A worker went away: the pool need not wait for its next look."""
        if self.hall.workers.dismissals != self._dismissals:
            self._dismissals = self.hall.workers.dismissals
            self._provided.news.notify()

    # ---- people -------------------------------------------------------------------------------------------------

    async def _status(self, peer_id: str, request: m.GetStatus) -> m.Reply:
        return self.status()

    async def _stop(self, peer_id: str, request: m.StopRun) -> m.Reply:
        self.books.request_stop(request.reason or "stopped by the operator")
        self.hall.pump()
        return m.Done()

    @property
    def last_metrics(self) -> StepMetrics | None:
        """Line of the newest step."""
        return self._to_learner.last_metrics

    def status(self) -> m.RunStatus:
        waits = self.hall.wait_reason if self.hall.queue.versions() else ""
        return run_status(self.books, self.last_metrics, self.clock.monotonic(), waits, self._relays())

    def prometheus(self) -> bytes:
        return exposition(self.status(), self.last_metrics, self.books)

    # ---- time ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch until the run has ended in order. Raises Starved when nobody makes progress any more."""
        try:
            async with AsyncExitStack() as opened, asyncio.TaskGroup() as group:
                for pool in self._pools:
                    if isinstance(pool, AbstractAsyncContextManager):
                        await opened.enter_async_context(pool)
                beside = [group.create_task(keep_anchors(self.hall), name="anchors")]
                if self._scorer is not None:
                    rescoring = keep_rescoring(self.hall, self._scorer)
                    beside.append(group.create_task(rescoring, name="rescoring"))
                if self._pools:
                    recalled = self._provided.recall()
                    providing = drive(self._provided, self._pools, self._rules, self.clock, self.events, recalled)
                    group.create_task(providing, name="provide")
                await self._watch()
                for loop in beside:
                    loop.cancel()
                self._provided.news.notify()
            self.books.account(self.clock.monotonic())
            await self.hall.durable()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors

    async def _watch(self) -> None:
        await self.hall.durable()
        for outcast in self.books.outcasts.all():
            await self.hall.seed.expel(outcast.worker_id)
        while not self.done.is_set():
            due = self.clock.monotonic() + self.config.coordinator.heartbeat_s
            await asyncio.sleep(self.config.coordinator.heartbeat_s)
            if self.hall.problem is not None:
                raise self.hall.problem
            now = self.clock.monotonic()
            self._excuse(now - due, now)
            self.hall.workers.tick(now)
            self._tell_dismissals()
            self._watch_progress(now)
            if self._ending.advance(now):
                self.done.set()
            self.hall.pump()
            await self.hall.durable()

    def _excuse(self, late_s: float, now: float) -> None:
        """A pause of this very process (SIGSTOP, a starved machine) is nobody else's silence (H05)."""
        if late_s > self.config.coordinator.heartbeat_s:
            self.books.fleet.excuse(late_s, now)
            self.hall.rows_at = min(now, self.hall.rows_at + late_s)
            self.hall.learner_at = min(now, self.hall.learner_at + late_s)
            self.events.emit("stood_still", seconds=round(late_s, 3))

    def _watch_progress(self, now: float) -> None:
        books = self.books
        if books.stop_reason:
            return
        progress = Progress(
            rows_s=now - self.hall.rows_at,
            learner_s=now - self.hall.learner_at,
            learner_attached=books.learner_attached,
            learner_waits=books.learner_waits,
            published=books.state.current is not None,
            workers_active=books.fleet.active_count,
            batch=self.hall.learner.lacking() + (BARREN if self.hall.workers.fruitless else ""),
            t_train_s=books.scoreboard.t_train_s,
            set_aside=next(reversed(books.outcasts.told().values()), ""),
        )
        sentence = starved(progress, self.config.coordinator.stall_s)
        if sentence is not None:
            self.events.emit("starved", why=sentence)
            raise Starved(sentence)

    def _answer_of(self) -> dict[type[m.Request], Callable[[str, Any], Awaitable[m.Reply]]]:
        workers, learner = self._to_workers, self._to_learner
        return {
            m.Hello: workers.hello,
            m.AwaitPolicy: workers.await_policy,
            m.CertifyRelay: workers.certify,
            m.RequestLease: workers.lease,
            m.SubmitGroup: workers.submit,
            m.Heartbeat: workers.heartbeat,
            m.Attach: learner.attach,
            m.RequestBatch: learner.batch,
            m.ReportStep: learner.report,
            m.AckCheckpoint: learner.ack_checkpoint,
            m.OfferSnapshot: learner.offer,
            m.PublishSnapshot: learner.publish,
            m.Leave: self._leave,
            m.GetStatus: self._status,
            m.StopRun: self._stop,
        }
