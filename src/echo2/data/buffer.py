"""The staleness-bounded buffer: which submissions are admitted, and which groups make batch t.

Invariants:
    I1  ``form_batch`` is the one guarantee of the staleness bound: no batch holds a row with v < t - S.
    I2  a row is admitted only for a policy of the surviving published history.
    I3  every row is in one state; the first accepted row of a (group, index) wins; judging a row again changes nothing.

Pure: no clock, I/O, async or logging; ``drain_changes`` hands out what must become durable, in order.

    submit ──▶ BUFFERED ──report_step──▶ TRAINED
       │           └──form_batch, fork──▶ EXPIRED
       │           └──distrust──────▶ REFUSED   distrusted
       ├──▶ REFUSED   malformed, stale, future, orphaned, duplicate, no_signal
       └──▶ FAILED    error, timeout, aborted
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
from blake3 import blake3

from echo2.data.admission import Asked, parse_record
from echo2.data.groups import Batch, BatchesDropped, BatchPut, Group, GroupState, Lease, RecordsDropped, Row, RowKey
from echo2.data.ledger import Ledger, version_of
from echo2.transport.messages import RowSubmission
from echo2.types import FinishReason, Policy, Prompt, RowState, Trajectory, Verdict

REMEMBERED_STEPS = 50
"""A retried submission gets its old verdict for so many steps after its group ended; later it is unattributed."""

_STATE_OF = {Verdict.ACCEPTED: RowState.BUFFERED, Verdict.FAILED: RowState.FAILED}

Lineage = Callable[[Policy], Verdict | None]
"""None for a policy of the surviving published history, else FUTURE or ORPHANED."""


class BufferRules(msgspec.Struct, frozen=True):
    staleness_budget: int
    """S"""
    groups_per_batch: int
    """P"""
    max_attempts: int
    order: str = "oldest"
    drop_zero_variance: bool = False
    """Refuse groups whose rewards are all equal, as a whole, when they close."""
    max_zero_variance_drops: int = 0
    """Per batch, so that a solved task cannot stall the run."""
    asked: Asked = Asked()
    """How leases ask for tokens to be drawn."""


class Buffer(Ledger):
    """The decisions; ``Ledger`` keeps the books."""

    def __init__(self, rules: BufferRules, lineage: Lineage) -> None:
        super().__init__()
        self.rules = rules
        self.lineage = lineage
        self.next_batch = 0
        """t: index of the next batch to form."""
        self.batches: dict[int, Batch] = {}
        """Formed batches that may be asked for again, and the one before them, for its digest."""
        self.records_from = 0
        """Records of earlier batches are gone: their steps are checkpointed."""
        self.next_group = 0
        self._zero_variance_drops = 0
        self._expired_to = 0
        """Live groups were last looked through for those older than this version."""

    # ---- leases -----------------------------------------------------------------------------------------------

    def open_group(self, prompt: Prompt, size: int) -> Group:
        """A new group; it is not durable before its first lease."""
        group = Group(group_id=self.next_group, prompt=prompt, size=size)
        self.next_group += 1
        self.groups[group.group_id] = group
        self.rows[group.group_id] = {}
        return group

    def grant(self, group: Group, lease_id: str, worker_id: str, policy: Policy) -> Lease:
        """Hand the group's missing indices to a worker: a new attempt."""
        lease = Lease(lease_id, worker_id, policy, self.missing(group))
        group.attempts.append(lease)
        group.leased = True
        self._overdue.discard(group.group_id)
        self._refresh_policy(group)
        self._put(group)
        return lease

    def mark_overdue(self, group_id: int) -> None:
        """The group's lease runs suspiciously long: the gate stops counting on it."""
        group = self.groups.get(group_id)
        if group is not None and group.leased:
            self._overdue.add(group_id)
            self._recount(group)

    def lose_lease(self, group_id: int, attempt: int) -> None:
        """The lease ended without a submission (worker gone, lease too old); its rows never existed."""
        group = self.groups.get(group_id)
        if group is not None and group.leased and group.attempt == attempt:
            group.leased = False
            self._settle(group)

    # ---- submissions ------------------------------------------------------------------------------------------

    def submit(self, group_id: int, attempt: int, submissions: Sequence[RowSubmission]) -> list[Verdict]:
        """Judge the rows of one attempt; a verdict each, in order. The caller has checked whose lease it is."""
        group = self.groups[group_id]
        lease = group.attempts[attempt - 1]
        known, missing = self.rows[group_id], set(self.missing(group))
        for submission in submissions:
            if submission.index in lease.indices and (submission.index, attempt) not in known:
                self._judge(group, attempt, submission, missing)
        if attempt == group.attempt:
            group.leased = False
        if group.state is GroupState.OPEN:
            self._settle(group)
        rows = [known.get((submission.index, attempt)) for submission in submissions]
        return [Verdict.UNATTRIBUTED if row is None else row.verdict for row in rows]

    def _judge(self, group: Group, attempt: int, submission: RowSubmission, missing: set[int]) -> None:
        """missing: indices of the group without an accepted row, kept up to date."""
        record = bytes(submission.record)
        trajectory: Trajectory | None = None
        if submission.status.is_failure:
            verdict = Verdict.FAILED
        elif not group.state.is_live or submission.index not in missing:
            verdict = Verdict.DUPLICATE
        elif isinstance(parsed := parse_record(record, group.prompt, self.rules.asked), str):
            verdict = Verdict.MALFORMED
        else:
            trajectory, verdict = parsed, self._admit(parsed)
        accepted = verdict is Verdict.ACCEPTED
        row = Row(
            group_id=group.group_id,
            index=submission.index,
            attempt=attempt,
            state=_STATE_OF.get(verdict, RowState.REFUSED),
            verdict=verdict,
            reward=trajectory.reward if trajectory else None,
            policy=trajectory.policy_min if trajectory else group.attempts[attempt - 1].policy,
            tokens=trajectory.sampled_tokens if trajectory else 0,
            truncated=trajectory is not None and trajectory.finish_reason is FinishReason.LENGTH,
            digest=blake3(record).hexdigest() if accepted else "",
            normalisation_key=trajectory.normalisation_key if trajectory else None,
        )
        if accepted:
            missing.discard(submission.index)
        self._add(row, record if accepted else None)

    def _admit(self, trajectory: Trajectory) -> Verdict:
        """Admission goes by the oldest policy of the record; the newest must be real, too (I2, I5)."""
        for policy in (trajectory.policy_min, trajectory.policy_max):
            outside = self.lineage(policy)
            if outside is not None:
                return outside
        if trajectory.policy_min.version < self.oldest_admissible:
            return Verdict.STALE
        return Verdict.ACCEPTED

    # ---- batches ----------------------------------------------------------------------------------------------

    @property
    def oldest_admissible(self) -> int:
        """t - S"""
        return self.next_batch - self.rules.staleness_budget

    @property
    def ready_count(self) -> int:
        """Closed admissible groups."""
        return sum(count for version, count in self.closed_by_version.items() if version >= self.oldest_admissible)

    def ready_groups(self) -> list[Group]:
        """Closed admissible groups, in the order in which a batch takes them."""
        newest_first = -1 if self.rules.order == "freshest" else 1
        ready = [g for g in self.closed() if version_of(g) >= self.oldest_admissible]
        return sorted(ready, key=lambda g: (newest_first * version_of(g), g.group_id))

    def form_batch(self) -> Batch | None:
        """Form batch t from P closed admissible groups, or None when there are too few. Advances t."""
        self.expire()
        if self.ready_count < self.rules.groups_per_batch:
            return None
        groups = self.ready_groups()[: self.rules.groups_per_batch]
        keys: list[RowKey] = []
        digest = blake3(str(self.next_batch).encode())
        for group in groups:
            group.state, group.batch = GroupState.TAKEN, self.next_batch
            for row in sorted(self.accepted(group), key=lambda r: r.index):
                keys.append(row.key)
                digest.update(f"|{row.key}{row.digest}".encode())
            self._put(group)
        batch = Batch(step=self.next_batch, digest=digest.hexdigest(), rows=tuple(keys))
        self.batches[batch.step] = batch
        self._changes.append(BatchPut(batch))
        self.next_batch += 1
        self._zero_variance_drops = 0
        self.expire()
        return batch

    def batch_rows(self, batch: Batch) -> list[Row]:
        return [self.rows[group_id][(index, attempt)] for group_id, index, attempt in batch.rows]

    def expire(self) -> None:
        """Let go of accepted rows that no batch may take any more.

        A running lease without accepted rows stays: its worker may have installed a newer version since.
        """
        oldest = self.oldest_admissible
        stale = set[int]()
        if oldest != self._expired_to and any(version < oldest for version in self.live):
            stale = {g for g, version in self._counted.items() if version < oldest}
        self._expired_to = oldest
        stale |= {g for g in self._unleased if version_of(self.groups[g]) < oldest}
        for group in (self.groups[g] for g in sorted(stale)):
            if not group.leased or self.accepted(group):
                self._drop(group)

    def report_step(self, step: int) -> None:
        """Batch ``step`` was trained. Repeating a report changes nothing."""
        keys = [row.key for row in self.batch_rows(self.batches[step]) if row.state is RowState.BUFFERED]
        self._move(keys, RowState.TRAINED)
        for group_id in sorted({key[0] for key in keys}):
            self._retire(self.groups[group_id], GroupState.TRAINED, self.next_batch)

    def release_records(self, before_step: int) -> None:
        """A checkpoint of ``before_step`` steps is durable: records of earlier batches are not needed again."""
        if before_step > self.records_from:
            self.records_from = before_step
            self.batches = {step: b for step, b in self.batches.items() if step >= before_step - 1}
            self._changes.append(RecordsDropped(before_step))
        self._forget(before_step - REMEMBERED_STEPS)

    def fork(self, step: int) -> None:
        """Roll back to ``step`` trained steps; ``lineage`` already judges by the surviving history.

        Batches made only of surviving policies are replayed as they are. From the first other one on they dissolve:
        rows already trained stay trained (in a lost history, so never again), untrained survivors are free again.
        """
        replayable = (i >= self.records_from and self._survives(self.batches[i]) for i in range(step, self.next_batch))
        first = step + sum(1 for _ in itertools.takewhile(bool, replayable))
        self.records_from = min(self.records_from, first)
        for batch in [b for b in self.batches.values() if b.step >= first]:
            del self.batches[batch.step]
            for group in (self.groups[g] for g in sorted({key[0] for key in batch.rows})):
                if group.state is GroupState.TAKEN:
                    group.state, group.batch = GroupState.CLOSED, None
                    self._put(group)
        if first < self.next_batch:
            self._changes.append(BatchesDropped(first))
            self.next_batch = first
        for group in [g for g in self.groups.values() if g.state.is_live]:
            if group.policy is not None and self.lineage(group.policy) is not None:
                self._drop(group)

    def distrust(self, worker_id: str) -> int:
        """The worker was set aside: refuse its rows that no batch holds, and let others fill its groups; how many.

        A formed batch stays as it is: it may be trained already, and a crash must replay it unchanged.
        """
        refused = 0
        for group in [g for g in self.groups.values() if g.state.is_live]:
            theirs = [row for row in self.accepted(group) if group.attempts[row.attempt - 1].worker_id == worker_id]
            if theirs:
                refused += len(theirs)
                self._move([row.key for row in theirs], RowState.REFUSED, Verdict.DISTRUSTED)
                group.state = GroupState.OPEN
                self._settle(group)
        return refused

    # ---- inside -----------------------------------------------------------------------------------------------

    def _survives(self, batch: Batch) -> bool:
        return all(self.lineage(row.policy) is None for row in self.batch_rows(batch))

    def _settle(self, group: Group) -> None:
        """After an attempt ended: close, wait for another attempt, or drop."""
        rows = self.accepted(group)
        self._refresh_policy(group)
        newest = [r for r in self.rows[group.group_id].values() if r.attempt == group.attempt]
        if len(rows) == group.size or (not group.leased and group.attempt >= self.rules.max_attempts):
            self._close(group, rows)
        elif any(row.verdict is Verdict.STALE for row in newest):
            # Its siblings were sampled by the same worker at the same time: another attempt could not catch up.
            self._drop(group)
        else:
            self._put(group)

    def _close(self, group: Group, rows: list[Row]) -> None:
        group.leased = False
        if len(rows) < 2:
            self._drop(group)
        elif self._lacks_signal(rows):
            self._zero_variance_drops += 1
            self._move([row.key for row in rows], RowState.REFUSED, Verdict.NO_SIGNAL)
            self._retire(group, GroupState.DROPPED, self.next_batch)
        else:
            group.state = GroupState.CLOSED
            self._put(group)

    def _lacks_signal(self, rows: list[Row]) -> bool:
        """Equal rewards say nothing, unless they are measured against those of other groups."""
        return (
            self.rules.drop_zero_variance
            and self._zero_variance_drops < self.rules.max_zero_variance_drops
            and all(row.reward == rows[0].reward and row.normalisation_key is None for row in rows)
        )

    def _drop(self, group: Group) -> None:
        rows = self.accepted(group)
        self.groups_dropped += 1
        if group.leased:
            self._orphaned.append(group.attempts[-1].lease_id)
        self.expired_tokens += sum(row.tokens for row in rows)
        self._move([row.key for row in rows], RowState.EXPIRED)
        self._retire(group, GroupState.DROPPED, self.next_batch)

    def _refresh_policy(self, group: Group) -> None:
        policies = [row.policy for row in self.accepted(group)]
        if group.leased:
            policies.append(group.attempts[-1].policy)
        group.policy = min(policies, default=group.policy)
