"""What the ray pool and the process that holds its line to Ray say to each other: lines of JSON on two pipes.

Invariant: each call has a number and gets one reply with it. The first call is ``Connect``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from echo2.provisioning.observation import Phase
from echo2.provisioning.pools.ray_offers import Needs, Node

MAX_LINE_BYTES = 64 * 2**20
"""Room for the machines and nodes of any cluster; a longer line is no reply."""


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is there for."""

    machine_id: str
    offer: str
    usd_per_h: float
    """What was agreed, for a later life of the pool that does not know the offer any more."""
    join: str
    program: tuple[str, ...]
    """What the node's Python is run with before ``--name`` and ``--dir``."""
    folder: str
    """On the node; ``~`` is the home of the user that Ray runs as there."""

    def __repr__(self) -> str:
        """Without the join string, which opens the run to whoever reads it."""
        return f"Duty(machine_id={self.machine_id!r}, offer={self.offer!r})"


class Connect(msgspec.Struct, frozen=True, tag=True):
    number: int
    address: str
    namespace: str


class Start(msgspec.Struct, frozen=True, tag=True):
    number: int
    duty: Duty
    needs: Needs


class Stop(msgspec.Struct, frozen=True, tag=True):
    number: int
    machine_id: str


class Look(msgspec.Struct, frozen=True, tag=True):
    number: int


Call = Connect | Start | Stop | Look


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that the cluster has, or had."""

    machine_id: str
    offer: str
    phase: Phase
    usd_per_h: float | None = None
    """None until its actor spoke."""
    age_s: float = 0.0
    """Since its worker was started."""
    node_id: str = ""
    detail: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    fault: Literal["", "unreachable", "refused"] = ""
    """Empty: it was done."""
    why: str = ""
    machines: tuple[Found, ...] = ()
    """To ``Look``, as the rest."""
    nodes: tuple[Node, ...] = ()
    available: Mapping[str, float] = {}


_CALLS: msgspec.json.Decoder[Call] = msgspec.json.Decoder(Call)
_REPLIES = msgspec.json.Decoder(Reply)


def encode(message: Call | Reply) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def read_call(line: bytes) -> Call:
    """Raises msgspec.DecodeError."""
    return _CALLS.decode(line)


def read_reply(line: bytes) -> Reply:
    """Raises msgspec.DecodeError."""
    return _REPLIES.decode(line)
