"""A run beside the prediction of it.

Invariant: pure; both sides are computed by the same functions from metrics lines, so a difference is one of the runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from echo2.metrics import StepMetrics
from echo2.provisioning.capacity import bubble_ratio


class Figures(msgspec.Struct, frozen=True):
    steps: int
    bubble_ratio: float
    steps_per_min: float
    staleness: dict[str, float]
    """Share of the trajectories by training steps."""


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a prediction may miss by."""

    bubble_ratio: float = 0.05
    steps_per_min: float = 0.10
    """Relative to the run's own."""
    staleness: float = 0.10
    """Total variation."""


class Comparison(msgspec.Struct, frozen=True):
    real: Figures
    predicted: Figures
    off: Bounds
    """By how much the prediction misses."""
    missed: tuple[str, ...]
    """Names of the bounds."""


def figures(runs: Sequence[Sequence[StepMetrics]], warm_up_steps: int = 0) -> Figures:
    """Of all these runs of one thing together, the first ``warm_up_steps`` of each left out.

    Raises ValueError where less than two steps are left of one.
    """
    settled = [lines[warm_up_steps:] for lines in runs]
    if not settled or min(map(len, settled)) < 2:
        raise ValueError(f"a run must have at least two steps after the first {warm_up_steps}")
    lines = [line for run in settled for line in run]
    counts: Counter[int] = Counter()
    for line in lines:
        counts.update({int(age): count for age, count in line.staleness_histogram.items()})
    took_s = math.fsum(run[-1].elapsed_s - run[0].elapsed_s for run in settled)
    return Figures(
        steps=len(lines),
        bubble_ratio=bubble_ratio(
            idle_s=math.fsum(line.idle_s for line in lines), training_s=math.fsum(line.t_train_s for line in lines)
        ),
        steps_per_min=60.0 * (len(lines) - len(settled)) / took_s,
        staleness={str(age): counts[age] / counts.total() for age in sorted(counts)},
    )


def compare(real: Figures, predicted: Figures, bounds: Bounds) -> Comparison:
    off = Bounds(
        bubble_ratio=abs(predicted.bubble_ratio - real.bubble_ratio),
        steps_per_min=abs(predicted.steps_per_min / real.steps_per_min - 1),
        staleness=total_variation(real.staleness, predicted.staleness),
    )
    missed = [name for name in Bounds.__struct_fields__ if getattr(off, name) > getattr(bounds, name)]
    return Comparison(real, predicted, off, tuple(missed))


def total_variation(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Largest difference in the share of any set of values: 0 for the same, 1 for nothing in common."""
    return math.fsum(abs(one.get(value, 0.0) - other.get(value, 0.0)) for value in one.keys() | other.keys()) / 2
