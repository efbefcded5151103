"""Everything programs say to one another, as typed data.

Invariant: a message is complete in itself. Requests name who asks only through the credential that carried them (the
``Principal`` the receiver derives), never through a field the sender could forge.

Every request has exactly one reply type, ``REPLY_OF[type(request)]``; on HTTP a request is ``POST /v1/<tag>`` with a
msgpack body. Long polls carry their own bounded ``wait_s`` (at most ``MAX_WAIT_S``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from echo2.types import Natural, Policy, Prompt, RowStatus, Sampling, Verdict

PROTOCOL_VERSION = 2
MAX_GROUP_ROWS = 4096
"""Rows of one submission: far more than a group has, few enough to cost nothing."""
MAX_WAIT_S = 30.0
"""Longest a long poll is held open: below the idle limits of common proxies."""
MAX_SECONDS = 1e9
"""Longest time that anybody may claim to have measured: thirty years."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
"""A measured time: never negative, infinite or not a number."""
Root = Annotated[str, msgspec.Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")]
"""An object's name: blake3 of its bytes, hexadecimal."""
MAX_HELD = 64
"""Snapshots, and objects under way, that a worker may tell of."""


class Role(StrEnum):
    WORKER = "worker"
    LEARNER = "learner"
    OBSERVER = "observer"
    OPERATOR = "operator"


class Principal(msgspec.Struct, frozen=True):
    """Who is asking, as proved by the credential."""

    role: Role
    peer_id: str


class Request(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    pass


class Reply(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    pass


# ---- enrolment -------------------------------------------------------------------------------------------------


class Enrol(Request, frozen=True):
    """Exchange a join token for a credential. The only request a join token is good for."""

    token: str
    name: str
    protocol_version: int
    package_version: str


class Enrolled(Reply, frozen=True):
    peer_id: str
    credential: str
    role: Role
    run_id: str
    snapshot_public_key: bytes
    """Ed25519 key that signs this run's manifests."""


# ---- worker ----------------------------------------------------------------------------------------------------


class AssetFile(msgspec.Struct, frozen=True):
    """A small file of the model directory (configuration, tokenizer) that a worker needs beside weights."""

    name: str
    size: int
    blake3: str


class Hello(Request, frozen=True):
    """A worker (re)starts: leases it does not list are given back."""

    held_leases: tuple[str, ...]
    task_fingerprints: dict[str, str]


class Welcome(Reply, frozen=True):
    """What a worker must know: the run's configuration (JSON of ``Config``), model assets, timing."""

    run_id: str
    config_json: str
    assets: tuple[AssetFile, ...]
    heartbeat_s: float
    current: Policy | None


class AwaitPolicy(Request, frozen=True):
    """Long poll until a policy newer than ``after`` is published."""

    after: Policy | None
    wait_s: float
    held: Annotated[tuple[Policy, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    """Policies whose verified snapshots lie on the worker's disk: deltas apply to them."""
    received: Annotated[dict[Root, Natural], msgspec.Meta(max_length=MAX_HELD)] = {}
    """Bytes that are here already of objects that are not whole yet."""


class PolicyNews(Reply, frozen=True):
    current: Policy | None
    path: tuple[bytes, ...] = ()
    """Signed manifests of the objects that bring the worker from what it holds to ``current``, in the order in which
    they apply; empty when it holds ``current``, and when there is nothing newer."""
    gone: tuple[Root, ...] = ()
    """Objects that the worker is receiving and that are not to be had any more."""


class CertifyRelay(Request, frozen=True):
    """A worker asks for the certificate under which other relays know it."""

    public_key_pem: Annotated[bytes, msgspec.Meta(max_length=4096)]


class RelayCertificate(Reply, frozen=True):
    certificate_pem: bytes
    authority_pem: bytes
    """Of the run: whoever it certified may be talked to."""
    seed_host: str
    """Where the seed is dialled; empty for the host at which the coordinator is."""
    seed_port: int
    """0: the run has no relays, objects come over HTTP."""


class RequestLease(Request, frozen=True):
    """Ask for work under the installed policy; held until the gate opens or ``wait_s`` passes."""

    installed: Policy
    wait_s: float


class LeaseGrant(Reply, frozen=True):
    """One prompt handed to one worker for the listed trajectories of its group."""

    lease_id: str
    group_id: int
    attempt: int
    prompt: Prompt
    indices: tuple[int, ...]
    sampling: Sampling
    policy: Policy
    """Version the worker reported installed when the lease was granted."""
    timeout_s: float
    purpose: str = "train"
    """`train`, or `eval`: scored and reported, outside I3's counts."""


class LeaseWait(Reply, frozen=True):
    """No lease now, and why."""

    reason: str


class RowSubmission(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    status: RowStatus
    error: str = ""
    record: msgspec.Raw = msgspec.Raw(b"\xc0")
    """msgpack of a ``Trajectory`` (nil for failures); stored as sent, so unknown fields survive."""


class SubmitGroup(Request, frozen=True):
    lease_id: str
    group_id: int
    attempt: int
    rows: Annotated[tuple[RowSubmission, ...], msgspec.Meta(max_length=MAX_GROUP_ROWS)]


class SubmitVerdicts(Reply, frozen=True):
    verdicts: tuple[Verdict, ...]
    """One per submitted row, in order."""


class Heartbeat(Request, frozen=True):
    installed: Policy | None
    leases: tuple[str, ...]
    generated_tokens: Natural = 0
    spooled_groups: Natural = 0
    state: str = ""
    """What the worker is doing, for people: `waiting: …`, `generating`, `installing 0.4`."""


class HeartbeatReply(Reply, frozen=True):
    drain: bool
    """Finish running leases, take no new ones, leave."""
    revoked_leases: tuple[str, ...] = ()


class Leave(Request, frozen=True):
    """A worker that has drained, or a learner that has finished, goes."""

    epoch: Natural = 0
    """The learner's; a worker has none."""


# ---- learner ---------------------------------------------------------------------------------------------------


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


class ReportStep(Request, frozen=True):
    epoch: Natural
    step: Natural
    """Index t of the step just trained; the policy is now version t + 1."""
    t_train_s: Seconds
    wait_s: Seconds
    stats: dict[str, float]
    """Learner's own measurements: loss, kl, entropy, clip_share, grad_norm, trainable_tokens …"""


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


class Done(Reply, frozen=True):
    pass


# ---- people ----------------------------------------------------------------------------------------------------


class GetStatus(Request, frozen=True):
    pass


class RunStatus(Reply, frozen=True):
    """A live picture of the run; ``workers`` rows carry id, name, installed, state, rate, price, last_seen_s."""

    run_id: str
    name: str
    phase: str
    """`waiting for a learner`, `training`, `draining`, `done`, or what it waits for."""
    step: int
    steps: int
    policy: Policy | None
    last_metrics: dict[str, Any]
    counts: dict[str, int]
    workers: tuple[dict[str, Any], ...]
    problem: str = ""


class StopRun(Request, frozen=True):
    """Orderly end: workers drain, the learner checkpoints and leaves."""

    reason: str = ""


REPLY_OF: dict[type[Request], type[Reply] | tuple[type[Reply], ...]] = {
    Enrol: Enrolled,
    Hello: Welcome,
    AwaitPolicy: PolicyNews,
    CertifyRelay: RelayCertificate,
    RequestLease: (LeaseGrant, LeaseWait),
    SubmitGroup: SubmitVerdicts,
    Heartbeat: HeartbeatReply,
    Leave: Done,
    Attach: Attached,
    RequestBatch: (BatchReply, BatchWait),
    ReportStep: StepAccepted,
    AckCheckpoint: Done,
    OfferSnapshot: SnapshotOffer,
    PublishSnapshot: Done,
    GetStatus: RunStatus,
    StopRun: Done,
}

ROLES_OF: dict[type[Request], frozenset[Role]] = {
    Hello: frozenset({Role.WORKER}),
    AwaitPolicy: frozenset({Role.WORKER}),
    CertifyRelay: frozenset({Role.WORKER}),
    RequestLease: frozenset({Role.WORKER}),
    SubmitGroup: frozenset({Role.WORKER}),
    Heartbeat: frozenset({Role.WORKER}),
    Leave: frozenset({Role.WORKER, Role.LEARNER}),
    Attach: frozenset({Role.LEARNER}),
    RequestBatch: frozenset({Role.LEARNER}),
    ReportStep: frozenset({Role.LEARNER}),
    AckCheckpoint: frozenset({Role.LEARNER}),
    OfferSnapshot: frozenset({Role.LEARNER}),
    PublishSnapshot: frozenset({Role.LEARNER}),
    GetStatus: frozenset(Role),
    StopRun: frozenset({Role.OPERATOR}),
}
"""Who may say what; ``Enrol`` is open to holders of a join token."""
