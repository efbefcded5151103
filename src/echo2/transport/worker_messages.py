"""What workers ask, and what they are answered.

Invariant: what a worker holds, and how much it sends at once, is bounded by its type, before anything looks at it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from echo2.transport.base_messages import AssetFile, Reply, Request, Root
from echo2.types import Natural, Policy, Prompt, RowStatus, Sampling, Verdict

MAX_GROUP_ROWS = 4096
"""Rows of one submission: far more than a group has, few enough to cost nothing."""
MAX_HELD = 64
"""Snapshots, and objects under way, that a worker may tell of."""


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
    received: Annotated[dict[Root, Natural], msgspec.Meta(max_length=MAX_HELD)] = msgspec.field(default_factory=dict)
    """Bytes that are here already of objects that are not whole yet."""
    installed: Policy | None = None
    """What the engine runs: whoever asks after an install tells of it, too."""


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
