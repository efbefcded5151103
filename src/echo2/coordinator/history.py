"""Which policies exist, and where the run stands: the small durable part of the coordinator's state.

Invariant (I2): versions never go back and never alias. A policy is judged by the surviving history: the versions known
(published, or resident beside the learner) under the current incarnation, and those of older ones up to each fork.
"""

from __future__ import annotations

import msgspec

from echo2.types import Policy, Verdict

PUBLISHED_KEPT = 64
"""Published policies remembered: far more than any staleness budget in use spans."""


class RunState(msgspec.Struct):
    """Everything the coordinator must remember beside groups, rows and batches; one small record, written often."""

    run_id: str
    incarnation: int = 0
    steps_reported: int = 0
    """Training steps whose report was taken; the learner's version as the coordinator knows it."""
    epoch: int = 0
    """Newest fencing epoch given to a learner."""
    published: list[Policy] = []
    """Of the surviving history, in order."""
    resident: list[Policy] = []
    """Of the surviving history, in order: versions that the learner's own engine generates with as soon as they exist
    (``workers.shared_device``), some of them published later. One that a crash took away is forked off."""
    checkpoint_step: int = -1
    """Newest step whose checkpoint is acknowledged; -1 before the first."""
    next_batch: int = 0
    next_group: int = 0
    cursor: int = 0
    """Prompts drawn so far."""
    elapsed_s: float = 0.0
    accounted_s: float = 0.0
    """When ``elapsed_s`` and ``cost_usd`` were right, on the coordinator's clock."""
    clock_offset_s: float | None = None
    """Wall time less that clock."""
    cost_usd: float = 0.0
    idle_s: float = 0.0
    training_s: float = 0.0
    publishes: int = 0
    deltas: int = 0
    """Publishes that were sent as deltas."""
    unattributed: int = 0
    groups_dropped: int = 0
    expired_tokens: int = 0
    initial_weights_hash: str = ""
    finished: bool = False
    secret: str = ""
    """Decides which rewards are scored again; no worker may know it."""
    rescored: int = 0
    """Rewards scored again so far."""
    rescored_differing: int = 0
    rescoring_failed: int = 0
    """Replies that could not be scored here, or not in time: evidence of nothing."""
    provisioning: bytes = b""
    """What the controller of the pools remembers, as ``coordinator.providing`` wrote it last."""

    @property
    def current(self) -> Policy | None:
        """Newest published policy."""
        return self.published[-1] if self.published else None

    @property
    def known(self) -> list[Policy]:
        """Everything that a trajectory may name, in order."""
        return sorted({*self.published, *self.resident}) if self.resident else self.published

    @property
    def learner_policy(self) -> Policy:
        return Policy(self.incarnation, self.steps_reported)

    def judge(self, policy: Policy) -> Verdict | None:
        """None for a policy of the surviving history, else why a trajectory of it is refused."""
        if policy in self.published or policy in self.resident:
            return None
        if self.published and policy.incarnation <= self.incarnation and policy.version < self.published[0].version:
            return None  # Too long ago to be remembered; it is stale whatever it was.
        return Verdict.ORPHANED if policy.incarnation < self.incarnation else Verdict.FUTURE

    def publish(self, policy: Policy) -> None:
        """Record a durable publish; publishing the current policy again changes nothing."""
        if policy == self.current:
            return
        assert self.current is None or policy > self.current, f"{policy} published after {self.current}"
        self.published = [*self.published, policy][-PUBLISHED_KEPT:]

    def settle(self, policy: Policy) -> None:
        """The learner's weights are ``policy``, and its own engine runs them; saying so again changes nothing."""
        if not self.resident or policy > self.resident[-1]:
            self.resident = [*self.resident, policy][-PUBLISHED_KEPT:]

    def fork(self, step: int) -> None:
        """Open a new incarnation at ``step``: later known versions are of a lost history."""
        self.incarnation += 1
        self.resident = [policy for policy in self.resident if policy.version <= step]
        self.published = [policy for policy in self.published if policy.version <= step]
        self.steps_reported = step
        self.checkpoint_step = min(self.checkpoint_step, step)
