"""What every message is made of, and what every program says.

Invariant: a request names its sender nowhere: the ``Principal`` is what the receiver derives from the credential that
carried it. Whoever claims a time or a wait claims a bounded one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from echo2.types import Natural

PROTOCOL_VERSION = 2
MAX_WAIT_S = 30.0
"""Longest a long poll is held open: below the idle limits of common proxies."""
MAX_SECONDS = 1e9
"""Longest time that anybody may claim to have measured: thirty years."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
"""A measured time: never negative, infinite or not a number."""
MOST_USD_PER_H = 1e5
"""What anybody may claim that a worker costs."""
Root = Annotated[str, msgspec.Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")]
"""An object's name: blake3 of its bytes, hexadecimal."""


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


class AssetFile(msgspec.Struct, frozen=True):
    """A small file of the model directory (configuration, tokenizer) that a worker needs beside weights."""

    name: str
    size: int
    blake3: str


# ---- every program ---------------------------------------------------------------------------------------------


class Enrol(Request, frozen=True):
    """Exchange a join token for a credential. The only request a join token is good for."""

    token: str
    name: str
    protocol_version: int
    package_version: str
    usd_per_h: Annotated[float, msgspec.Meta(ge=0, le=MOST_USD_PER_H)] | None = None
    """What the worker costs; None where its owner does not say."""


class Enrolled(Reply, frozen=True):
    peer_id: str
    credential: str
    role: Role
    run_id: str
    snapshot_public_key: bytes
    """Ed25519 key that signs this run's manifests."""


class Leave(Request, frozen=True):
    """A worker that has drained, or a learner that has finished, goes."""

    epoch: Natural = 0
    """The learner's; a worker has none."""


class Done(Reply, frozen=True):
    pass
