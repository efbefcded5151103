"""The speeds of a run, read from what its coordinator wrote down: what a scenario needs to be played as it was.

Invariant: pure; nothing but metrics lines and events is looked at, so whatever left them can be measured: a real run,
or a simulated one, which must give back the speeds that it was played with. What was never seen takes no time.

What a coordinator sees holds its own part: a group lies between a lease and a submission, two crossings and a commit
apart from its generation, and the shortest turnarounds from a submission to the next lease tell how long those are.
When a snapshot was decoded shows only where its worker could have switched to it: an engine that went on to another
group had nothing to switch to yet.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from echo2.metrics import StepMetrics
from echo2.simulation.models import WorldModel

COMMIT_S = WorldModel().commit_s
"""Of a modelled store."""
QUICK_SHARE = 0.1
"""Quantile that only undisturbed ones reach."""
QUICK_FACTOR = 3.0
"""So many times that quantile, a worker has waited for more than the line: the gate, or a place in the queue."""
LEAST_S = 1e-3
"""Of a group: a modelled one must take time."""
REPORT_S = 0.1
"""Within which an install and the submission of the group that it waited for arrive, in either order."""

FREE_MBPS = 1e5
"""A line that costs nothing."""

Event = Mapping[str, Any]


class Pace(msgspec.Struct, frozen=True):
    """Log-normal."""

    median_s: float
    spread: float
    count: int


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    train: Pace
    groups: dict[str, Pace]
    """By worker's name."""
    worker_latency_s: float
    """One way, the coordinator's answering and the worker's writing included."""
    learner_latency_s: float
    checkpoint_s: float
    snapshot_s: float
    """Writing, comparing and uploading it."""
    decode_s: float
    """From the news of a snapshot until a worker could switch to it, the transfer included."""
    activation_s: float
    snapshot_bytes: int
    delta_share: float
    """Of a snapshot's size that a publish sends."""


class _Lease(NamedTuple):
    granted_s: float
    submitted_s: float


class _Publish(NamedTuple):
    step_s: float
    """When its step was reported."""
    checkpoint_s: float | None
    published_s: float


def speeds(lines: Sequence[StepMetrics], events: Iterable[Event], warm_up_steps: int = 0) -> Speeds:
    """Of the run after its first ``warm_up_steps``. Raises ValueError for a run that was too short to tell."""
    settled = lines[warm_up_steps:]
    timed = [event for event in events if isinstance(event.get("wall_time"), int | float)]
    began_s = next((e["wall_time"] for e in timed if e["kind"] == "step" and e["step"] >= warm_up_steps), None)
    if len(settled) < 2 or began_s is None:
        raise ValueError(f"a run must have at least two steps after the first {warm_up_steps}, got {len(lines)}")
    leases = {worker: [x for x in all_of if x.granted_s >= began_s] for worker, all_of in _leases(timed).items()}
    turnaround_s = _turnaround_s(leases.values())
    worker_latency_s = max(0.0, (turnaround_s - COMMIT_S) / 2)
    learner_latency_s = _learner_latency_s(settled, timed)
    publishes = {policy: x for policy, x in _publishes(timed).items() if x.published_s >= began_s}
    installs = [e for e in timed if e["kind"] == "installed" and e.get("policy") in publishes]
    at_s: defaultdict[str, list[float]] = defaultdict(list)
    for install in installs:
        at_s[install["worker"]].append(install["wall_time"])
    activation_s = _activation_s(installs, leases, QUICK_FACTOR * turnaround_s)
    here_s = _here_s(publishes, installs, leases, activation_s)
    names = {e["worker"]: str(e.get("name") or e["worker"]) for e in timed if e["kind"] == "worker_joined"}
    sent = [line.publish_bytes / line.snapshot_bytes for line in settled if line.snapshot_bytes]
    return Speeds(
        train=pace([line.t_train_s for line in settled]),
        groups={
            names.get(worker, worker): pace(_generating_s(leases[worker], at_s[worker], turnaround_s))
            for worker in sorted(leases, key=lambda worker: names.get(worker, worker))
            if leases[worker]
        },
        worker_latency_s=worker_latency_s,
        learner_latency_s=learner_latency_s,
        checkpoint_s=_checkpoint_s(list(publishes.values()), learner_latency_s),
        snapshot_s=_snapshot_s(publishes.values(), learner_latency_s),
        decode_s=max(0.0, here_s - 2 * worker_latency_s),
        activation_s=max(0.0, activation_s - worker_latency_s),
        snapshot_bytes=settled[-1].snapshot_bytes,
        delta_share=statistics.median(sent) if sent else 1.0,
    )


def pace(values: Sequence[float]) -> Pace:
    logs = [math.log(value) for value in values if value > 0]
    if not logs:
        return Pace(0.0, 0.0, 0)
    return Pace(math.exp(statistics.fmean(logs)), statistics.pstdev(logs), len(logs))


# ---- workers ---------------------------------------------------------------------------------------------------------


def _leases(events: Iterable[Event]) -> dict[str, list[_Lease]]:
    """By worker, those that ended in a submission, in that order."""
    granted: dict[str, float] = {}
    found: defaultdict[str, list[_Lease]] = defaultdict(list)
    for event in events:
        if event["kind"] == "lease":
            granted[event["lease"]] = event["wall_time"]
        elif event["kind"] == "submit" and event["lease"] in granted:
            found[event["worker"]].append(_Lease(granted.pop(event["lease"]), event["wall_time"]))
    return dict(found)


def _turnaround_s(leases: Iterable[Sequence[_Lease]]) -> float:
    """From a submission to the worker's next lease, where nothing but the line lies between them: mean of those."""
    gaps = []
    for served in leases:
        grants = sorted(lease.granted_s for lease in served)
        for lease in served:
            following = bisect_right(grants, lease.submitted_s)
            gaps += [at_s - lease.submitted_s for at_s in grants[following : following + 1]]
    quick_s = quantile(gaps, QUICK_SHARE)
    return statistics.fmean([gap for gap in gaps if gap <= QUICK_FACTOR * quick_s]) if gaps else 0.0


def _generating_s(leases: Iterable[_Lease], installs_s: Sequence[float], turnaround_s: float) -> list[float]:
    """Of each lease. An engine lets no group begin while it switches, so one that saw an install began after it."""
    found = []
    for lease in leases:
        seen = [at_s for at_s in installs_s if lease.granted_s < at_s < lease.submitted_s - REPORT_S]
        began_s = max([lease.granted_s, *(at_s - turnaround_s for at_s in seen)])
        found.append(max(LEAST_S, lease.submitted_s - began_s - turnaround_s))
    return found


def _activation_s(installs: Iterable[Event], leases: Mapping[str, Sequence[_Lease]], quick_s: float) -> float:
    """From the end of a group to the report of the install that had waited for it; only of workers that wanted to go on
    at once: of one that had nothing to do it cannot be told from the time that the snapshot took to come."""
    waited_s = []
    for install in installs:
        served = leases.get(install["worker"], ())
        before = [lease.submitted_s for lease in served if lease.submitted_s <= install["wall_time"] + REPORT_S]
        if before and any(0 < lease.granted_s - before[-1] <= quick_s for lease in served):
            waited_s.append(max(0.0, install["wall_time"] - before[-1]))
    return quantile(waited_s, QUICK_SHARE)


def _here_s(
    publishes: Mapping[str, _Publish],
    installs: Iterable[Event],
    leases: Mapping[str, Sequence[_Lease]],
    activation_s: float,
) -> float:
    """From a publish until a worker could switch to it."""
    brackets = []
    for install in installs:
        published_s, here_by_s = publishes[install["policy"]].published_s, install["wall_time"] - activation_s
        served = leases.get(install["worker"], ())
        if not any(x.granted_s < here_by_s < x.submitted_s + REPORT_S for x in served):
            not_before_s = here_by_s  # It had nothing to do and switched at once.
        else:
            # At the end of each group before that the engine would have switched, had there been anything to switch to.
            ends = [x.submitted_s for x in served if published_s < x.submitted_s < here_by_s - REPORT_S]
            not_before_s = max([published_s, *ends])
        brackets.append((not_before_s - published_s, max(not_before_s, here_by_s) - published_s))
    return nearest(brackets)


def nearest(brackets: Sequence[tuple[float, float]]) -> float:
    """The value whose distances from all brackets are least in sum, which is the median of their ends. 0 for none."""
    return statistics.median([end for bracket in brackets for end in bracket]) if brackets else 0.0


# ---- the learner -----------------------------------------------------------------------------------------------------


def _learner_latency_s(lines: Sequence[StepMetrics], events: Sequence[Event]) -> float:
    """Half of what lies between a step's report and the question for the next batch, and around a training step."""
    idle_s = {line.step: line.idle_s for line in lines}
    train_s = {line.step: line.t_train_s for line in lines}
    reported: dict[int, float] = {}
    formed: dict[int, float] = {}
    for event in events:
        if event["kind"] == "step":
            reported[event["step"]] = event["wall_time"]
        elif event["kind"] == "batch":
            formed[event["step"]] = event["wall_time"]
    between = [formed[t] - reported[t - 1] - idle_s[t] for t in idle_s if t in formed and t - 1 in reported]
    around = [reported[t] - formed[t] - train_s[t] for t in train_s if t in reported and t in formed]
    gaps = [max(0.0, statistics.median(found) - COMMIT_S) for found in (between, around) if found]
    return statistics.fmean(gaps) / 2 if gaps else 0.0


def _publishes(events: Iterable[Event]) -> dict[str, _Publish]:
    """By policy, those whose step, and whose becoming visible, were seen."""
    reported: dict[int, float] = {}
    durable: dict[int, float] = {}
    found: dict[str, _Publish] = {}
    for event in events:
        if event["kind"] == "step":
            reported[event["step"] + 1] = event["wall_time"]
        elif event["kind"] == "checkpoint":
            durable[event["step"]] = event["wall_time"]
        elif event["kind"] == "published":
            version = int(str(event["policy"]).rpartition(".")[2])
            if version in reported and str(event["policy"]) not in found:
                found[str(event["policy"])] = _Publish(reported[version], durable.get(version), event["wall_time"])
    return found


def _checkpoint_s(publishes: Sequence[_Publish], latency_s: float) -> float:
    """One that waited for the publish before it began when that was through."""
    spans = [
        publish.checkpoint_s - max(publish.step_s, before.published_s) - 2 * latency_s - COMMIT_S
        for before, publish in pairwise(publishes)
        if publish.checkpoint_s is not None
    ]
    return max(0.0, statistics.median(spans)) if spans else 0.0


def _snapshot_s(publishes: Iterable[_Publish], latency_s: float) -> float:
    """Between a checkpoint's acknowledgement and a visible snapshot lie two offers, before and after the upload, and
    the word to publish: six crossings."""
    spans = [publish.published_s - (publish.checkpoint_s or publish.step_s) for publish in publishes]
    return max(0.0, statistics.median(spans) - 6 * latency_s - 2 * COMMIT_S) if spans else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """By the nearest rank; 0 for none."""
    found = sorted(values)
    return found[max(0, math.ceil(share * len(found)) - 1)] if found else 0.0


# ---- a scenario ------------------------------------------------------------------------------------------------------


def scenario_of(
    tables: Mapping[str, Any], measured: Speeds, *, seed: int = 0, warm_up_steps: int = 0
) -> dict[str, Any]:
    """Tables of a scenario: the run's own configuration (``tables``), played at these speeds.

    Lines are as fast as can be: how long objects take to arrive is measured as one with how long they take to decode.
    """
    rehearsal = {
        **tables.get("rehearsal", {}),
        "train_s": measured.train.median_s,
        "train_spread": measured.train.spread,
        "snapshot_bytes": measured.snapshot_bytes,
    }
    world = {
        "seed": seed,
        "warm_up_steps": warm_up_steps,
        "uplink_mbps": FREE_MBPS,
        "learner_latency_s": measured.learner_latency_s,
        "checkpoint_s": measured.checkpoint_s,
        "snapshot_s": measured.snapshot_s,
        "delta_share": min(1.0, measured.delta_share),
    }
    workers = [
        {
            "name": f"worker-{number}",
            "group_s": worker.median_s,
            "group_spread": worker.spread,
            "decode_s": measured.decode_s,
            "activation_s": measured.activation_s,
            "latency_s": measured.worker_latency_s,
            "jitter": 0.0,
            "down_mbps": FREE_MBPS,
        }
        for number, worker in enumerate(measured.groups.values(), start=1)
    ]
    return {**tables, "rehearsal": rehearsal, "world": world, "workers": workers}
