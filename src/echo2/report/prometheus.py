"""The text of ``/metrics``.

Invariant: a page is a pure function of one status, one metrics line and some counters; it has a registry of its own, so
nothing of the process leaks into it and two coordinators in one process do not collide. Names start with ``echo2_`` and
end with their unit; what only grows is a counter.

Worker names come from other machines. They appear only as label values, which the exposition format escapes, and the
number of series is bounded by the number of enrolled workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from echo2.metrics import StepMetrics
from echo2.transport.messages import RunStatus

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("reward_mean", "reward", "Mean reward of all rows judged for the last step"),
    ("reward_trained_mean", "reward_trained", "Mean reward of the last batch"),
    ("staleness_max", "staleness_max_steps", "Largest staleness in the last batch"),
    ("staleness_mean", "staleness_mean_steps", "Mean staleness of the last batch"),
    ("staleness_bound", "staleness_bound_steps", "Planned staleness bound, equation (7)"),
    ("bubble_ratio", "bubble_ratio", "Idle share of the learner since the start"),
    ("t_train_s", "train_step_seconds", "T_train of the last step"),
    ("t_bcast_s", "broadcast_seconds", "T_bcast of the newest completed publish"),
    ("mu_pool_per_s", "pool_trajectories_per_second", "Delivered rate of the active workers"),
    ("mu_target_per_s", "target_trajectories_per_second", "gamma times the chosen rule's required rate"),
    ("mu_min_per_s", "required_trajectories_per_second", "Required rate, equation (2)"),
    ("length_mean", "reply_tokens", "Mean sampled tokens per trajectory of the last batch"),
    ("truncated_share", "truncated_ratio", "Share of the last batch cut at the token limit"),
    ("usd_per_h", "cost_usd_per_hour", "What an hour costs at the moment"),
    (
        "t_bcast_predicted_s",
        "broadcast_predicted_seconds",
        "When the relays' plan has the newest object at most workers",
    ),
    ("t_bcast_bound_s", "broadcast_bound_seconds", "No plan could be faster at the measured rates"),
    ("snapshot_bytes", "snapshot_bytes", "Size of the newest published snapshot, decoded"),
    ("publish_bytes", "publish_bytes", "Size of the object that the newest publish sent"),
    ("delta_share", "delta_publishes_ratio", "Share of the publishes sent as deltas"),
    ("changed_share", "changed_elements_ratio", "Share of elements that the newest delta changed"),
)
"""(field of StepMetrics, metric name without prefix, help)."""


def exposition(status: RunStatus, metrics: StepMetrics | None, counters: Mapping[str, float]) -> bytes:
    """Prometheus text of a run.

    ``counters`` are further cumulative counts such as ``{"requests": 120, "leases_lost": 2}``; each becomes
    ``echo2_<name>_total``.
    """
    registry = CollectorRegistry()
    registry.register(_Page(status, metrics, counters))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, status: RunStatus, metrics: StepMetrics | None, counters: Mapping[str, float]) -> None:
        self._status = status
        self._metrics = metrics
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        yield from _of_status(self._status)
        yield from _of_workers(self._status.workers)
        yield _of_set_aside(self._status.set_aside)
        if self._metrics is not None:
            yield from _of_metrics(self._metrics)
        for name, value in sorted(self._counters.items()):
            yield CounterMetricFamily(f"echo2_{name}", f"Cumulative count of {name.replace('_', ' ')}", value=value)


def _of_status(status: RunStatus) -> Iterator[Metric]:
    info = GaugeMetricFamily("echo2_run_info", "1, with the run's names", labels=["run_id", "name", "phase"])
    info.add_metric([status.run_id, status.name, status.phase], 1)
    yield info
    yield _gauge("step", "Training steps done", status.step)
    yield _gauge("steps_planned", "Training steps the run is to have", status.steps)
    if status.policy is not None:
        yield _gauge("published_version", "Newest published policy version", status.policy.version)
    rows = GaugeMetricFamily("echo2_rows", "Rows by state; all but `generated` sum to it", labels=["state"])
    for state, count in sorted(status.counts.items()):
        rows.add_metric([state], count)
    yield rows


def _of_workers(workers: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    rate = GaugeMetricFamily(
        "echo2_worker_trajectories_per_second", "Delivered rate of a worker", labels=["worker", "name"]
    )
    silent = GaugeMetricFamily(
        "echo2_worker_silence_seconds", "Time since a worker was last heard", labels=["worker", "name"]
    )
    reachable = GaugeMetricFamily(
        "echo2_worker_reachable", "Whether other workers can dial a worker's relay", labels=["worker", "name"]
    )
    count = 0
    for row in workers:
        count += bool(row.get("active", True))
        labels = [str(row.get("id", "")), str(row.get("name", ""))]
        rate.add_metric(labels, float(row.get("rate_per_s") or 0.0))
        silent.add_metric(labels, float(row.get("last_seen_s") or 0.0))
        if row.get("reachable") is not None:
            reachable.add_metric(labels, float(row["reachable"]))
    yield _gauge("workers", "Workers that are heard from", count)
    yield rate
    yield silent
    yield reachable


def _of_set_aside(workers: Iterable[Mapping[str, Any]]) -> Metric:
    labels = ["worker", "name", "reason"]
    gauge = GaugeMetricFamily(
        "echo2_worker_set_aside", "1 for a worker whose work is not taken any more", labels=labels
    )
    for row in workers:
        gauge.add_metric([str(row.get(label, "")) for label in ("id", "name", "reason")], 1)
    return gauge


def _of_metrics(metrics: StepMetrics) -> Iterator[Metric]:
    for field, name, text in _GAUGES:
        value = getattr(metrics, field)
        if value is not None:
            yield _gauge(name, text, value)
    for title, by_task in (
        ("reward", metrics.reward_by_task), ("rows", metrics.rows_by_task), ("pass_ratio", metrics.pass_share_by_task)
    ):  # fmt: skip
        family = GaugeMetricFamily(f"echo2_task_{title}", "Of the rows judged for the last step", labels=["task"])
        for task, number in sorted(by_task.items()):
            family.add_metric([task], float(number))
        yield family
    yield CounterMetricFamily("echo2_cost_usd", "USD spent so far", value=metrics.cost_usd)
    refused = CounterMetricFamily("echo2_refused_rows", "Refused rows by verdict", labels=["verdict"])
    for verdict, count in sorted(metrics.refused_by.items()):
        refused.add_metric([verdict], count)
    yield refused
    yield CounterMetricFamily(
        "echo2_relay_sent_bytes", "Sent by the coordinator's relay since it started", value=metrics.seed_sent_bytes
    )
    yield CounterMetricFamily(
        "echo2_relay_reparentings", "Times a relay turned to another parent", value=metrics.reparentings
    )
    sent = CounterMetricFamily("echo2_worker_sent_bytes", "Sent by a worker's relay to others", labels=["worker"])
    for worker, count in sorted(metrics.sent_bytes_by_node.items()):
        sent.add_metric([worker], count)
    yield sent
    yield from _of_audits(metrics)
    learner = GaugeMetricFamily("echo2_learner", "The learner's statistics of the last step", labels=["statistic"])
    for statistic, value in sorted(metrics.learner.items()):
        learner.add_metric([statistic], value)
    yield learner


def _of_audits(metrics: StepMetrics) -> Iterator[Metric]:
    for field, name, text in (
        ("mean_nats", "mismatch_nats", "Mean |difference| per token of a worker's log-probs from the learner's"),
        ("p99_nats", "mismatch_p99_nats", "99th percentile of that difference"),
        ("beyond_share", "mismatch_beyond_ratio", "Share of tokens that differ by more than half a nat"),
        ("tokens", "audited_tokens", "Tokens whose log-probs were compared"),
    ):
        family = GaugeMetricFamily(f"echo2_worker_{name}", text, labels=["worker", "name"])
        for worker, mismatch in sorted(metrics.audited.items()):
            family.add_metric([worker, mismatch.name], float(getattr(mismatch, field)))
        yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"echo2_{name}", text, value=float(value))
