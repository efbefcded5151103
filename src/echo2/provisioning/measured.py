"""What a run has measured that a plan can go by.

Invariant: pure; a quantity that the run did not record is None, never a guess.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from echo2.metrics import StepMetrics

PROFILED_STEPS = 5
"""T_train is the median of so many steps (paper, section 3)."""
RECENT_GROUPS = 64
"""T_gen is the median of so many."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    steps: int = 0
    t_train_s: float | None = None
    """Median of the last ``PROFILED_STEPS`` steps."""
    t_bcast_s: float | None = None
    """Of the newest publish that arrived."""
    t_gen_s: float | None = None
    """Median time from a group's lease to its submission."""
    bytes_per_publish: float | None = None
    """Mean size of what was sent, anchors included."""
    rollouts_per_worker_per_s: float | None = None
    """Delivered by an active worker while it had work."""
    reply_tokens: float | None = None
    """Mean length of a reply."""


def measured(metrics: Sequence[StepMetrics], events: Iterable[Mapping[str, object]]) -> Measured:
    """From the lines of ``metrics.jsonl``, rising steps, and of ``events.jsonl``."""
    if not metrics:
        return Measured()
    recent, last = metrics[-PROFILED_STEPS:], metrics[-1]
    sizes = [line.publish_bytes for line in metrics if line.publish_bytes] or [last.snapshot_bytes]
    return Measured(
        steps=len(metrics),
        t_train_s=statistics.median(line.t_train_s for line in recent),
        t_bcast_s=last.t_bcast_s,
        t_gen_s=_t_gen_s(events),
        bytes_per_publish=statistics.fmean(sizes) or None,
        rollouts_per_worker_per_s=last.mu_pool_per_s / last.workers_active or None if last.workers_active else None,
        reply_tokens=statistics.fmean(line.length_mean for line in recent) or None,
    )


def _t_gen_s(events: Iterable[Mapping[str, object]]) -> float | None:
    granted: dict[object, float] = {}
    taken: list[float] = []
    for event in events:
        lease, at_s = event.get("lease"), event.get("wall_time")
        if not isinstance(lease, str) or not isinstance(at_s, int | float):
            continue
        if event.get("kind") == "lease":
            granted[lease] = at_s
        elif event.get("kind") == "submit" and lease in granted:
            taken.append(at_s - granted.pop(lease))
    plausible = [seconds for seconds in taken[-RECENT_GROUPS:] if seconds >= 0]
    return statistics.median(plausible) if plausible else None
