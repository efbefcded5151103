"""What people ask of a run.

Invariant: looking changes nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from echo2.transport.base_messages import Reply, Request
from echo2.types import Policy


class GetStatus(Request, frozen=True):
    pass


class RunStatus(Reply, frozen=True):
    """A live picture of the run.

    Rows of ``workers`` carry id, name, installed, state, rate, price and last_seen_s, and of the worker's relay whether
    it is ``reachable`` (None for unknown), ``sent_bytes`` and ``reparentings``.
    """

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
    set_aside: tuple[dict[str, Any], ...] = ()
    """Workers whose work is not taken any more: id, name, reason and wall_time."""
    rescored: dict[str, int] = msgspec.field(default_factory=dict)
    """Rewards scored again: ``checked``, ``differing`` and ``failed``."""


class StopRun(Request, frozen=True):
    """Orderly end: workers drain, the learner checkpoints and leaves."""

    reason: str = ""
