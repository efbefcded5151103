"""What came of a simulated run, in numbers.

Invariant: pure; computed from the run's own events and metrics lines, as they would be of a real one. What did not
happen is None, never 0. Where a rollback trained a step again, its newest line stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from echo2.metrics import StepMetrics
from echo2.provisioning.capacity import bubble_ratio

Event = Mapping[str, Any]


class Spread(msgspec.Struct, frozen=True):
    """Of several measurements."""

    p50: float
    p90: float
    max: float


class Staleness(msgspec.Struct, frozen=True):
    """Training steps between the version that sampled a trajectory and the step that trained on it."""

    mean: float
    max: int
    histogram: dict[str, int]
    """Trajectories by their staleness."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    virtual_s: float
    """From the start of the coordinator to its end."""
    step_s: float | None
    """Mean time from step to step, the first ``warm_up_steps`` left out."""
    bubble_ratio: float
    """Of all steps."""
    bubble_ratio_settled: float | None
    """The first ``warm_up_steps`` left out."""
    t_train_s: Spread | None
    t_bcast_s: Spread | None
    """Of every publish that arrived."""
    staleness: Staleness | None
    staleness_excess: int
    """Batches whose oldest trajectory was older than (12) had it at the times then measured."""
    cost_usd: float
    cost_usd_per_step: float | None
    """Mean over all steps, the way to the first one included."""
    workers_active_mean: float | None
    mu_pool_per_s: float | None
    """Mean of the steps after the warm-up."""
    mu_target_per_s: float | None
    generated: int
    trained: int
    expired: int
    refused: int
    failed: int
    buffered: int
    activations: int
    """Machines that the controller ordered."""
    releases: int
    losses: int
    """Workers that fell silent, and machines that were taken away."""
    stopped: str
    """Why the run ended before its last step; empty when it did not."""


def outcome(
    metrics: Sequence[StepMetrics], events: Iterable[Event], ended_s: float, steps: int, warm_up_steps: int = 0
) -> Outcome:
    """steps: that were asked for.  warm_up_steps: at the beginning, in which a pool fills."""
    metrics = list({line.step: line for line in metrics}.values())
    settled = metrics[warm_up_steps:] if len(metrics) > warm_up_steps else []
    last = metrics[-1] if metrics else None
    seen = _Seen(events)
    return Outcome(
        steps=len(metrics),
        virtual_s=ended_s,
        step_s=_step_s(settled),
        bubble_ratio=last.bubble_ratio if last else 0.0,
        bubble_ratio_settled=_bubble(settled) if settled else None,
        t_train_s=spread([m.t_train_s for m in metrics]),
        t_bcast_s=spread(seen.t_bcast_s),
        staleness=_staleness(metrics),
        staleness_excess=sum(
            m.staleness_bound_tight is not None and m.staleness_max > m.staleness_bound_tight for m in metrics
        ),
        cost_usd=last.cost_usd if last else 0.0,
        cost_usd_per_step=last.cost_usd / len(metrics) if last else None,
        workers_active_mean=_over_time(metrics, [float(m.workers_active) for m in metrics]),
        mu_pool_per_s=_mean([m.mu_pool_per_s for m in settled]),
        mu_target_per_s=_mean([m.mu_target_per_s for m in settled if m.mu_target_per_s is not None]),
        generated=last.generated if last else 0,
        trained=last.trained if last else 0,
        expired=last.expired if last else 0,
        refused=last.refused if last else 0,
        failed=last.failed if last else 0,
        buffered=last.buffered if last else 0,
        activations=seen.activations,
        releases=seen.releases,
        losses=seen.losses,
        stopped=seen.stopped if len(metrics) < steps else "",
    )


def spread(values: Iterable[float]) -> Spread | None:
    """By the nearest rank, so that each is one of the values."""
    found = sorted(values)
    if not found:
        return None
    ranks = (math.ceil(share * len(found)) - 1 for share in (0.5, 0.9, 1.0))
    return Spread(*(found[rank] for rank in ranks))


class _Seen:
    """One walk over the events, which may be many."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.t_bcast_s: list[float] = []
        self.activations = self.releases = 0
        self._names: dict[str, str] = {}
        self._lost: set[str] = set()
        self.stopped = ""
        for event in events:
            match event["kind"]:
                case "disseminated":
                    self.t_bcast_s.append(event["t_bcast_s"])
                case "provisioning_activate":
                    self.activations += event["machines"]
                case "provisioning_release":
                    self.releases += 1
                case "worker_joined":
                    self._names[event["worker"]] = str(event["name"])
                case "worker_silent":
                    self._lost.add(self._names.get(event["worker"], str(event["worker"])))
                case "machine_gone":
                    self._lost.add(str(event["machine"]))
                case "stop_requested":
                    self.stopped = event["reason"]

    @property
    def losses(self) -> int:
        return len(self._lost)


def _bubble(lines: Sequence[StepMetrics]) -> float:
    return bubble_ratio(idle_s=math.fsum(m.idle_s for m in lines), training_s=math.fsum(m.t_train_s for m in lines))


def _step_s(lines: Sequence[StepMetrics]) -> float | None:
    if len(lines) < 2:
        return None
    return (lines[-1].elapsed_s - lines[0].elapsed_s) / (len(lines) - 1)


def _staleness(lines: Sequence[StepMetrics]) -> Staleness | None:
    histogram: dict[int, int] = {}
    for line in lines:
        for age, count in line.staleness_histogram.items():
            histogram[int(age)] = histogram.get(int(age), 0) + count
    total = sum(histogram.values())
    if not total:
        return None
    mean = sum(age * count for age, count in histogram.items()) / total
    return Staleness(mean, max(histogram), {str(age): histogram[age] for age in sorted(histogram)})


def _over_time(lines: Sequence[StepMetrics], values: Sequence[float]) -> float | None:
    """Each value for the time up to its line."""
    if not lines:
        return None
    times = [0.0, *(line.elapsed_s for line in lines)]
    total_s = times[-1] - times[0]
    if total_s <= 0:
        return values[-1]
    return math.fsum(v * (after - before) for v, (before, after) in zip(values, pairwise(times), strict=True)) / total_s


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
