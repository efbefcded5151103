"""Held-out prompts scored by the pool under one tagged version, outside I3's counts.

Invariant: every reply of an evaluation was sampled by the version it is reported under. An evaluation ends when all
its prompts are scored, or when no worker holds that version any more; then it reports how many were scored.

Pure: prompts and identifiers are handed in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

import msgspec

from echo2.data.admission import Asked, parse_record
from echo2.transport.messages import RowSubmission
from echo2.types import Policy, Prompt, Trajectory, Verdict


class EvalLine(msgspec.Struct, frozen=True):
    """A line of ``evals.jsonl``."""

    step: int
    """Training step that asked for it."""
    version: int
    reward_mean: float
    reward_stderr: float
    """Of the mean over prompts."""
    prompts: int
    """Prompts scored."""
    prompts_asked: int
    replies: int
    failed: int
    length_mean: float
    reward_by_task: dict[str, float] = {}
    """Mean over the prompts of each task."""


class EvalLease(msgspec.Struct, frozen=True):
    number: int
    """Of the prompt."""
    worker_id: str
    granted_s: float


class Evaluation:
    """One evaluation, from its trigger to its line."""

    def __init__(self, step: int, prompts: Sequence[Prompt], samples: int, asked: Asked = Asked()) -> None:  # noqa: B008
        """asked: how leases ask for tokens to be drawn."""
        self.step = step
        self.policy: Policy | None = None
        """Pinned to the first version published after the trigger."""
        self.prompts = list(prompts)
        self.samples = samples
        self._asked = asked
        self.waiting = list(range(len(prompts)))[::-1]
        self.leased: dict[str, EvalLease] = {}
        self.scores: dict[int, list[Trajectory]] = {}
        self._scored_by: dict[int, str] = {}
        self.failed = 0

    def take(self, lease_id: str, worker_id: str, installed: Policy, now: float) -> Prompt | None:
        """The next prompt for a worker that holds the pinned version."""
        if installed != self.policy or not self.waiting:
            return None
        number = self.waiting.pop()
        self.leased[lease_id] = EvalLease(number, worker_id, now)
        return self.prompts[number]

    def reconcile(self, worker_id: str, held: Sequence[str], granted_before: float) -> None:
        """Prompts that the worker does not hold any more go to others."""
        for lease_id, lease in list(self.leased.items()):
            if lease.worker_id == worker_id and lease_id not in held and lease.granted_s <= granted_before:
                del self.leased[lease_id]
                self.waiting.append(lease.number)

    def expire(self, granted_before: float) -> None:
        """Prompts that were leased too long ago go to others."""
        for lease_id, lease in list(self.leased.items()):
            if lease.granted_s < granted_before:
                del self.leased[lease_id]
                self.waiting.append(lease.number)

    def prompt_of(self, lease_id: str) -> Prompt:
        """What a running lease is about."""
        return self.prompts[self.leased[lease_id].number]

    def distrust(self, worker_id: str) -> None:
        """The worker was set aside: what it scored is scored by others."""
        for number in [number for number, scorer in self._scored_by.items() if scorer == worker_id]:
            del self._scored_by[number]
            if self.scores.pop(number, None) is not None:
                self.waiting.append(number)

    def submit(self, lease_id: str, worker_id: str, rows: Sequence[RowSubmission]) -> list[Verdict]:
        """Score the replies to one prompt. A reply of another version is stale here, whatever the budget."""
        lease = self.leased.get(lease_id)
        if lease is None or lease.worker_id != worker_id or len({row.index for row in rows}) != len(rows):
            return [Verdict.UNATTRIBUTED] * len(rows)
        del self.leased[lease_id]
        number = lease.number
        self._scored_by[number] = worker_id
        verdicts = []
        for row in rows[: self.samples]:
            failed, record = row.status.is_failure, bytes(row.record)
            parsed = "failed" if failed else parse_record(record, self.prompts[number], self._asked)
            if isinstance(parsed, str):
                self.failed += 1
                verdicts.append(Verdict.FAILED if failed else Verdict.MALFORMED)
            elif parsed.policy_min != self.policy or parsed.policy_max != self.policy:
                verdicts.append(Verdict.STALE)
            else:
                self.scores.setdefault(number, []).append(parsed)
                verdicts.append(Verdict.ACCEPTED)
        return verdicts + [Verdict.UNATTRIBUTED] * (len(rows) - len(verdicts))

    def is_over(self, installed: Collection[Policy | None]) -> bool:
        """All prompts are scored, or nobody can score the rest. ``installed`` are the active workers' policies."""
        if self.policy is None or self.leased:
            return False
        return not self.waiting or all(version is not None and version > self.policy for version in installed)

    def line(self) -> EvalLine | None:
        """The result, or None when nothing was scored."""
        if self.policy is None or not self.scores:
            return None
        means = [statistics.fmean(t.reward for t in replies) for _, replies in sorted(self.scores.items())]
        replies = [t for found in self.scores.values() for t in found]
        by_task: dict[str, list[float]] = {}
        for number, found in sorted(self.scores.items()):
            by_task.setdefault(self.prompts[number].task, []).append(statistics.fmean(t.reward for t in found))
        return EvalLine(
            step=self.step,
            version=self.policy.version,
            reward_mean=statistics.fmean(means),
            reward_stderr=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0,
            prompts=len(means),
            prompts_asked=len(self.prompts),
            replies=len(replies),
            failed=self.failed,
            length_mean=statistics.fmean(t.sampled_tokens for t in replies),
            reward_by_task={task: statistics.fmean(rewards) for task, rewards in sorted(by_task.items())},
        )
