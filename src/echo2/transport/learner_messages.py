"""What the learner asks, and what it is answered.

Invariant: each request but the first carries the fencing epoch that ``Attached`` gave, so a learner that was replaced
is refused.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from echo2.transport.base_messages import AssetFile, Reply, Request, Root, Seconds
from echo2.types import Natural, Policy


class Attach(Request, frozen=True):
    """A learner (re)starts at ``step`` (training steps its weights hold)."""

    run_id: str
    step: Natural
    last_batch_digest: str
    """Digest of batch step-1; empty at step 0."""
    initial_weights_hash: str
    assets: tuple[AssetFile, ...]
    rollback: bool = False
    """True only when the user asked to resume below a published version: opens a new incarnation."""


class Attached(Reply, frozen=True):
    epoch: int
    """Fencing epoch: requests with an older one are refused."""
    policy: Policy
    """The policy that the learner's weights are."""
    missing_assets: tuple[str, ...]
    publish_needed: bool
    """True when ``policy`` must be published (again) before the first batch."""
    last_step_reported: int
    """Steps the coordinator knows; more than the learner's when it replays."""
    stop_after_step: int


class RequestBatch(Request, frozen=True):
    epoch: Natural
    step: Natural
    wait_s: float


class BatchRow(msgspec.Struct, frozen=True):
    group_id: int
    index: int
    record: msgspec.Raw


class BatchReply(Reply, frozen=True):
    """Batch t: the same rows however often it is asked for."""

    step: int
    digest: str
    rows: tuple[BatchRow, ...]


class BatchWait(Reply, frozen=True):
    reason: str
    stop: bool = False


AUDIT_EDGES_NATS = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Between the bins that differences of log-probs are counted in; the last bin is open."""
MOST_AUDITED = 256
"""Rows that a step's report may tell of."""
_Sum = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Bins = Annotated[
    tuple[Natural, ...], msgspec.Meta(min_length=len(AUDIT_EDGES_NATS) + 1, max_length=len(AUDIT_EDGES_NATS) + 1)
]


class RowAudit(msgspec.Struct, frozen=True):
    """A row's behaviour log-probs against those of the version that it names, over its sampled tokens; in nats."""

    group_id: Natural
    index: Natural
    bins: _Bins
    """Tokens by |difference|."""
    total: _Sum
    """Sum of |difference|."""
    largest: _Sum
    excess: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] | None = None
    """Sum of log-prob + entropy under that version: 0 on average for tokens that were drawn from it. None where top-p
    was below 1."""

    @property
    def tokens(self) -> int:
        return sum(self.bins)


class ReportStep(Request, frozen=True):
    epoch: Natural
    step: Natural
    """Index t of the step just trained; the policy is now version t + 1."""
    t_train_s: Seconds
    wait_s: Seconds
    stats: dict[str, float]
    """Learner's own measurements: loss, kl, entropy, clip_share, grad_norm, trainable_tokens …"""
    audits: Annotated[tuple[RowAudit, ...], msgspec.Meta(max_length=MOST_AUDITED)] = ()
    """Of some rows of batch t, computed before the step."""


class StepAccepted(Reply, frozen=True):
    policy: Policy
    publish: bool
    """True when this version is to be checkpointed and published."""
    stop: bool
    """True when the run ends with this step."""


class AckCheckpoint(Request, frozen=True):
    epoch: Natural
    step: Natural


class OfferSnapshot(Request, frozen=True):
    """Announce an object for upload: manifest as JSON bytes, unsigned; the reply says what is missing of it."""

    epoch: Natural
    manifest: bytes


class SnapshotOffer(Reply, frozen=True):
    received_bytes: int
    """Upload continues from here; equal to the object size when nothing is missing."""
    send_raw: bool = False
    """The coordinator lacks the base of the offered delta: offer the whole snapshot instead."""


class PublishSnapshot(Request, frozen=True):
    """All bytes are uploaded: verify, sign, make visible. Only after the checkpoint is acknowledged."""

    epoch: Natural
    policy: Policy
    root: Root
    """Of the object that was uploaded for it."""
