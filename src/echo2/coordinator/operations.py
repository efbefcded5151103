"""What the coordinator makes durable, as data.

Invariant: the operations of one commit become visible together or not at all, and in the order of commits. Whatever
was acknowledged to a client is in a finished commit.
"""

from __future__ import annotations

import msgspec

from echo2.coordinator.history import RunState
from echo2.data.groups import Batch, Change, Group, Row
from echo2.transport.messages import AssetFile, Role
from echo2.types import RowState, Verdict


class RunPut(msgspec.Struct, frozen=True):
    state: RunState


class MetricsPut(msgspec.Struct, frozen=True):
    """The line of a step; a step of a new incarnation replaces the line of the lost one."""

    step: int
    line: bytes


class MetricsDropped(msgspec.Struct, frozen=True):
    first_step: int


class EvalPut(msgspec.Struct, frozen=True):
    step: int
    line: bytes


class AssetsPut(msgspec.Struct, frozen=True):
    assets: tuple[AssetFile, ...]


class Token(msgspec.Struct, frozen=True):
    """A join token, by the hash of its secret."""

    digest: str
    role: Role
    expires_wall: float
    uses_left: int
    machine_id: str = ""
    """Of the pool's machine that it was made for; empty for people's."""


class Peer(msgspec.Struct, frozen=True):
    """An enrolled program, by the hash of its credential."""

    peer_id: str
    name: str
    role: Role
    digest: str
    revoked: bool = False
    machine_id: str = ""
    """The pool's machine that it runs on; empty for who joined by itself."""
    usd_per_h: float | None = None
    """What its owner says that it costs; None where the run's configuration says it."""


class Outcast(msgspec.Struct, frozen=True):
    """A worker that was set aside."""

    worker_id: str
    name: str
    reason: str
    wall_time: float


class OutcastPut(msgspec.Struct, frozen=True):
    outcast: Outcast


class TokenPut(msgspec.Struct, frozen=True):
    token: Token


class PeerPut(msgspec.Struct, frozen=True):
    peer: Peer


Operation = Change | RunPut | MetricsPut | MetricsDropped | EvalPut | AssetsPut | TokenPut | PeerPut | OutcastPut


class Loaded(msgspec.Struct, frozen=True):
    """What a store remembers, enough to go on: groups and rows that are live, taken or recent, and all counts."""

    state: RunState | None = None
    groups: tuple[Group, ...] = ()
    rows: tuple[Row, ...] = ()
    batches: tuple[Batch, ...] = ()
    counts: dict[RowState, int] = {}
    refused_by: dict[Verdict, int] = {}
    metrics: tuple[bytes, ...] = ()
    evals: tuple[bytes, ...] = ()
    assets: tuple[AssetFile, ...] = ()
    tokens: tuple[Token, ...] = ()
    peers: tuple[Peer, ...] = ()
    outcasts: tuple[Outcast, ...] = ()
