"""What workers ask for: leases, verdicts, and a sign that they are heard.

Invariant: a lease is granted only through the gate, and a submission is judged only under the lease that binds it to
its worker; everything else is unattributed and changes no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from blake3 import blake3

from echo2.coordinator.books import Books
from echo2.coordinator.fleet import RunningLease, WorkerRecord
from echo2.coordinator.operations import Peer
from echo2.data.groups import Group
from echo2.data.lease_gate import GateInputs, closed_because, horizon
from echo2.data.ledger import version_of
from echo2.transport.messages import Heartbeat, HeartbeatReply, LeaseGrant, SubmitGroup
from echo2.types import Policy, Prompt, RowState, Sampling, Verdict

LEASE_REPLY_GRACE_S = 10.0
"""A lease its worker never mentions is given back after this: the reply that carried it was lost."""
MAX_STATE_CHARACTERS = 200
"""What a worker says of itself, as people are shown it."""


class WorkerDesk:
    def __init__(self, books: Books) -> None:
        self.books = books
        self.config, self.state, self.events = books.config, books.state, books.events
        self.buffer, self.fleet = books.buffer, books.fleet
        self._stands_by = any(pool.kind == "standby" for pool in books.config.pools)
        self.fruitless = False
        """A lease ended without an accepted row, and none was accepted since: granting more is no progress (I7)."""
        self.dismissals = 0
        """Workers that left or fell silent so far."""

    # ---- workers ------------------------------------------------------------------------------------------------

    def resume(self, peer_of: Callable[[str], Peer], now: float) -> None:
        """After a restart: leases that ran go on, counted from now on this process's clock, and so do their workers,
        as who they were: on the machine of a pool, or as volunteers."""
        for group in sorted(self.buffer.groups.values(), key=lambda g: g.group_id):
            if group.leased:
                lease = group.attempts[-1]
                self.seen(peer_of(lease.worker_id), now)
                self.fleet.start(
                    RunningLease(lease.lease_id, lease.worker_id, group.group_id, group.attempt, granted_s=now)
                )

    def seen(self, peer: Peer, now: float) -> WorkerRecord:
        was = self.fleet.workers.get(peer.peer_id)
        is_new = was is None or not was.active
        worker = self.fleet.seen(peer.peer_id, peer.name, now, peer.machine_id, peer.usd_per_h)
        if is_new:
            worker.volunteers = self._stands_by and not peer.machine_id
            worker.waits = worker.volunteers and not worker.machine_id
            self.events.emit("worker_joined", worker=peer.peer_id, name=peer.name, stands_by=worker.waits)
        if not peer.machine_id and not worker.volunteers and peer.peer_id not in self.books.bill.rentals:
            self.books.bill = self.books.bill.rent(peer.peer_id, worker.usd_per_h, now)
        return worker

    def hello(self, worker_id: str, held: Sequence[str], now: float) -> None:
        """The worker (re)started: leases it does not hold any more are free again."""
        for lease in self.fleet.leases_of(worker_id):
            if lease.lease_id not in held:
                self.lose(lease, "its worker restarted", now)
        if self.books.evaluation is not None:
            self.books.evaluation.reconcile(worker_id, held, granted_before=now)
        self.fleet.run(worker_id, None)
        self.fleet.restarted(worker_id)

    def heartbeat(self, worker_id: str, beat: Heartbeat, now: float) -> HeartbeatReply:
        worker = self.fleet.workers[worker_id]
        worker.state, worker.spooled_groups = beat.state[:MAX_STATE_CHARACTERS], beat.spooled_groups
        self.note_installed(worker_id, beat.installed, now)
        grace = max(LEASE_REPLY_GRACE_S, 5 * self.config.coordinator.heartbeat_s)
        for lease in self.fleet.leases_of(worker_id):
            if lease.lease_id not in beat.leases and now - lease.granted_s > grace:
                self.lose(lease, "its worker does not know it", now)
        evaluated = {}
        if self.books.evaluation is not None:
            self.books.evaluation.reconcile(worker_id, beat.leases, granted_before=now - grace)
            evaluated = self.books.evaluation.leased
        revoked = tuple(x for x in beat.leases if x not in self.fleet.leases and x not in evaluated)
        return HeartbeatReply(drain=self.books.draining or worker.draining, revoked_leases=revoked)

    def note_installed(self, worker_id: str, installed: Policy | None, now: float) -> bool:
        """What the worker says that its engine runs; whether that is new."""
        if installed is None or installed == self.fleet.workers[worker_id].installed:
            return False
        if self.state.judge(installed) is Verdict.FUTURE:
            # Nobody can hold it: believed, it would end a publish and an evaluation that nobody has seen.
            self.events.emit("impossible_install", worker=worker_id, policy=str(installed))
            return False
        self.fleet.run(worker_id, installed)
        self.events.emit("installed", worker=worker_id, policy=str(installed))
        self.books.publishing.installs(worker_id, installed)
        self.books.note_installs(now)
        return True

    def leave(self, worker_id: str, now: float) -> None:
        worker = self.fleet.workers.get(worker_id)
        for lease in self.fleet.leases_of(worker_id):
            self.lose(lease, "its worker left", now)
        if worker is not None and worker.active:
            self.fleet.retire(worker_id, left=True)
            self.dismiss(worker, now)

    def dismiss(self, worker: WorkerRecord, now: float) -> None:
        """It went away: nothing is owed to it, and nobody waits for it, any more."""
        self.dismissals += 1
        self.books.bill = self.books.bill.release(worker.worker_id, now)
        if self.books.evaluation is not None:
            self.books.evaluation.reconcile(worker.worker_id, (), granted_before=now)
        self.events.emit("worker_left", worker=worker.worker_id)
        self.books.publishing.loses(worker.worker_id)
        self.books.note_installs(now)

    def lose(self, lease: RunningLease, why: str, now: float) -> None:
        self.fruitless = True
        self.fleet.end(lease.lease_id, now, None)
        self.buffer.lose_lease(lease.group_id, lease.attempt)
        self.events.emit("lease_lost", lease=lease.lease_id, group=lease.group_id, worker=lease.worker_id, why=why)

    def return_lease(self, grant: LeaseGrant, now: float) -> None:
        """The grant never reached its worker."""
        lease = self.fleet.leases.get(grant.lease_id)
        if lease is not None:
            self.lose(lease, "its worker hung up", now)

    def tick(self, now: float) -> None:
        """What only time changes: silent workers, lost and overdue leases, an evaluation nobody can finish."""
        silent, lost = self.fleet.lost(now)
        for worker in silent:
            self.events.emit("worker_silent", worker=worker.worker_id, silent_s=now - worker.last_seen_s)
            # Taken away, not given back: nothing more is owed for it.
            self.books.bill = self.books.bill.lose(worker.worker_id, now)
            self.dismiss(worker, now)
        for lease in lost:
            self.lose(lease, "its worker fell silent or it grew too old", now)
        self._end_dropped(now)
        for lease in self.fleet.newly_overdue(now):
            self.buffer.mark_overdue(lease.group_id)
        if self.books.evaluation is not None:
            self.books.evaluation.expire(granted_before=now - self.config.coordinator.lease_max_s)
        self.books.account(now)
        self.books.finish_evaluation()

    def _end_dropped(self, now: float) -> None:
        """Leases whose group aged out or was rolled back: their workers are told to stop, their versions may go."""
        for lease_id in self.buffer.drain_orphaned():
            if (lease := self.fleet.leases.get(lease_id)) is not None:
                self._end(lease, "its group is gone", now)

    def _end(self, lease: RunningLease, why: str, now: float) -> None:
        self.fleet.end(lease.lease_id, now, None)
        self.events.emit("lease_ended", lease=lease.lease_id, group=lease.group_id, worker=lease.worker_id, why=why)

    # ---- leases and submissions ---------------------------------------------------------------------------------

    def gate(self, version: int) -> str | None:
        """Why no lease at ``version`` is granted now; None when one may be."""
        planned = self.books.scoreboard.planned_staleness(self.fleet.mean_lease_s())
        limit = horizon(self.config.staleness_budget, planned, self.books.learner_waits)
        inputs = GateInputs(
            next_batch=self.buffer.next_batch,
            horizon=limit,
            groups_per_batch=self.config.prompts_per_step,
            last_batch=self.config.run.steps - 1,
            live=self.buffer.live,
            published=self._known_since(version),
        )
        return closed_because(inputs, version)

    def _known_since(self, version: int) -> tuple[int, ...]:
        """Known versions that bound what may be leased at ``version``: it itself and newer ones."""
        return tuple(takewhile(lambda v: v >= version, (policy.version for policy in reversed(self.state.known))))

    def has_no_part(self, worker_id: str) -> str | None:
        """Why this worker, unlike others with the same version, gets no lease; None when it may.

        Raises SetAside for one that was set aside while it waited.
        """
        self.books.outcasts.check(worker_id)
        worker = self.fleet.workers[worker_id]
        if worker.waits:
            return "the worker stands by: the others suffice"
        return "its machine is given back" if worker.draining else None

    def lease(self, worker_id: str, installed: Policy, now: float) -> LeaseGrant | str:
        """A lease, or why there is none now."""
        worker = self.fleet.workers[worker_id]
        ending = bool(self.books.stop_reason)
        if self.books.draining or worker.draining or (ending and not self.books.all_steps_reported):
            return "the run is ending"
        if self.state.judge(installed) is not None:
            return f"version {installed} is not of this run's published history: install {self.state.current} first"
        granted = self._lease_evaluation(worker_id, installed, now)
        if granted is not None:
            return granted
        group = "the run is ending" if ending else self._next_group(installed)
        if isinstance(group, str):
            return group
        lease = self.buffer.grant(group, self.books.ids.new("lease"), worker_id, installed)
        self.fleet.start(RunningLease(lease.lease_id, worker_id, group.group_id, group.attempt, granted_s=now))
        self.events.emit(
            "lease",
            lease=lease.lease_id,
            group=group.group_id,
            attempt=group.attempt,
            worker=worker_id,
            policy=str(installed),
        )
        # A lease that was merely lost is drawn again as it was; one that brought rows is drawn anew.
        draw = 1 + len({attempt for _, attempt in self.buffer.rows[group.group_id]})
        return self._grant(lease.lease_id, group.group_id, group.attempt, group.prompt, lease.indices, installed, draw)

    def _next_group(self, installed: Policy) -> Group | str:
        """A group whose last attempt failed, if it can still be trained; else a new one."""
        for group in self.buffer.awaiting_lease():
            if self.gate(min(version_of(group), installed.version)) is None:
                return group
        closed = self.gate(installed.version)
        if closed is not None:
            return closed
        return self.buffer.open_group(self.books.next_prompt(), self.config.rollout.group_size)

    def _grant(
        self,
        lease_id: str,
        group_id: int,
        attempt: int,
        prompt: Prompt,
        indices: tuple[int, ...],
        policy: Policy,
        draw: int = 1,
        purpose: str = "train",
    ) -> LeaseGrant:
        rollout = self.config.rollout
        seed = blake3(f"{self.config.run.seed}/{purpose}/{group_id}/{draw}".encode()).digest()[:7]
        sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_new_tokens=rollout.max_new_tokens,
            seed=int.from_bytes(seed, "little"),
        )
        return LeaseGrant(
            lease_id=lease_id,
            group_id=group_id,
            attempt=attempt,
            prompt=prompt,
            indices=indices,
            sampling=sampling,
            policy=policy,
            timeout_s=rollout.episode_timeout_s,
            purpose=purpose,
        )

    def submit(self, worker_id: str, submission: SubmitGroup, now: float) -> list[Verdict]:
        """Judge the rows of a lease; see ``Buffer.submit``."""
        rows = submission.rows
        if self.books.evaluation is not None and submission.lease_id in self.books.evaluation.leased:
            prompt = self.books.evaluation.prompt_of(submission.lease_id)
            verdicts = self.books.evaluation.submit(submission.lease_id, worker_id, rows)
            self.books.docket.put(worker_id, prompt, submission, verdicts)
            self.books.finish_evaluation()
            return verdicts
        lease = self.buffer.lease_of(submission.group_id, submission.attempt)
        if lease is None or (lease.lease_id, lease.worker_id) != (submission.lease_id, worker_id):
            self.state.unattributed += len(rows)
            return [Verdict.UNATTRIBUTED] * len(rows)
        known = set(self.buffer.rows[submission.group_id])
        verdicts = self.buffer.submit(submission.group_id, submission.attempt, rows)
        self.state.unattributed += sum(verdict is Verdict.UNATTRIBUTED for verdict in verdicts)
        born = [row for key, row in self.buffer.rows[submission.group_id].items() if key not in known]
        if born:
            self.fruitless = not any(row.verdict is Verdict.ACCEPTED for row in born)
        group = self.buffer.groups[submission.group_id]
        self.books.scoreboard.judged(group.prompt.task, [row.reward for row in born if row.reward is not None])
        if born:
            self.books.docket.put(worker_id, group.prompt, submission, verdicts)
        self.fleet.end(submission.lease_id, now, len(born))
        if not group.leased:
            for attempt in group.attempts:
                other = self.fleet.leases.get(attempt.lease_id)
                if other is not None:
                    self._end(other, "another attempt finished its group", now)
        self.fleet.delivered(worker_id, sum(row.state is RowState.BUFFERED for row in born), now)
        self.events.emit(
            "submit",
            lease=submission.lease_id,
            group=submission.group_id,
            worker=worker_id,
            verdicts=",".join(verdicts),
        )
        return verdicts

    def _lease_evaluation(self, worker_id: str, installed: Policy, now: float) -> LeaseGrant | None:
        if self.books.evaluation is None:
            return None
        lease_id = self.books.ids.new("eval")
        prompt = self.books.evaluation.take(lease_id, worker_id, installed, now)
        if prompt is None:
            return None
        number = self.books.evaluation.leased[lease_id].number
        indices = tuple(range(self.config.eval.samples))
        return self._grant(lease_id, number, 1, prompt, indices, installed, purpose="eval")
