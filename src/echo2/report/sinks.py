"""Where metrics go, one line per training step.

Invariant: ``metrics.jsonl`` holds whole lines only, at most one for each (incarnation, step), in rising order; writing
a step again, after a crash between the store's commit and the file, changes nothing. The other sinks are for people's
convenience: they may fail, be reported once and fall silent, but they never raise into the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from echo2.durable import write_all
from echo2.errors import ConfigError
from echo2.metrics import StepMetrics

TAIL_BYTES = 1 << 20
"""How far back the last whole line is looked for when a file is reopened; no line comes near it."""


class MetricsSink(Protocol):
    """Takes the metrics of each step. Calls may block on disk, so an event loop makes them in a thread."""

    def write(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """An append-only file of whole JSON lines, each on disk before ``append`` returns.

    A line that a crash cut short is removed when the file is opened. A write that fails (disk full) leaves the file as
    it was and raises OSError.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._file).st_size
        tail = os.pread(self._file, TAIL_BYTES, max(0, self._size - TAIL_BYTES))
        whole, newline, torn = tail.rpartition(b"\n")
        if torn:
            self._truncate(self._size - len(torn))
        self.last_line: bytes | None = whole.rpartition(b"\n")[2] if newline else None

    def append(self, record: Any) -> None:
        """Any record msgspec knows, or ``msgspec.Raw`` of a line that is encoded already."""
        line = msgspec.json.encode(record) + b"\n"
        try:
            write_all(self._file, line)
            os.fsync(self._file)
        except OSError:
            self._truncate(self._size)
            raise
        self._size += len(line)
        self.last_line = line[:-1]

    def close(self) -> None:
        os.close(self._file)

    def _truncate(self, size: int) -> None:
        os.ftruncate(self._file, size)
        os.fsync(self._file)
        self._size = size


class JsonlSink:
    """``metrics.jsonl``: the record of the run, continued after a restart."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._last = (-1, -1)
        if self._lines.last_line:
            last = msgspec.json.decode(self._lines.last_line)
            self._last = (last["policy_incarnation"], last["step"])

    @property
    def last_step(self) -> int:
        """Newest step in the file, -1 when it is empty."""
        return self._last[1]

    def write(self, metrics: StepMetrics) -> None:
        key = (metrics.policy_incarnation, metrics.step)
        if key <= self._last:
            return
        self._lines.append(metrics)
        self._last = key

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink:
    """TensorBoard event files, written with the ``tensorboard`` package alone."""

    def __init__(self, folder: Path) -> None:
        files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = files.EventFileWriter(str(folder))

    def write(self, metrics: StepMetrics) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(metrics).items()]
        event = self._event(wall_time=metrics.wall_time, step=metrics.step, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; its own client queues and retries, so writing does not wait for the network."""

    def __init__(self, project: str, run_id: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project, id=run_id, name=name, dir=str(folder), config=dict(config), resume="allow"
        )

    def write(self, metrics: StepMetrics) -> None:
        self._run.log(scalars(metrics), step=metrics.step)

    def close(self) -> None:
        self._run.finish()


class Guarded:
    """A sink whose failure is reported once and ends only the sink."""

    def __init__(self, sink: MetricsSink, name: str, report: Callable[[str], None]) -> None:
        self._sink: MetricsSink | None = sink
        self._name = name
        self._report = report

    def write(self, metrics: StepMetrics) -> None:
        self._attempt(lambda sink: sink.write(metrics))

    def close(self) -> None:
        self._attempt(lambda sink: sink.close())
        self._sink = None

    def _attempt(self, action: Callable[[MetricsSink], None]) -> None:
        if self._sink is None:
            return
        try:
            action(self._sink)
        except Exception as error:  # whatever a third party raises must not reach the run
            self._sink = None
            self._report(f"{self._name} stopped taking metrics, the run goes on without it: {error!r}")


def require_packages(*, tensorboard: bool, wandb_project: str) -> None:
    """Raise ConfigError when an asked-for sink's package is not installed; imports nothing."""
    wanted = {"tensorboard": ("metrics.tensorboard", tensorboard), "wandb": ("metrics.wandb_project", wandb_project)}
    faults = [
        f"{key} needs the package {package}, which is not installed here: "
        f"run `pip install 'echo2[{package}]'`, or take {key} out of the configuration"
        for package, (key, asked) in wanted.items()
        if asked and importlib.util.find_spec(package) is None
    ]
    if faults:
        raise ConfigError(faults)


def open_sinks(
    *,
    run_dir: Path,
    run_id: str,
    run_name: str,
    tensorboard: bool,
    wandb_project: str,
    config: Mapping[str, Any],
    report: Callable[[str], None],
) -> Sequence[MetricsSink]:
    """The sinks of a run, ``metrics.jsonl`` first. Blocks on disk.

    Raises ConfigError when an asked-for package is not installed; every other failure goes to ``report``, so that a
    restart during a network outage does not end the run.
    """
    require_packages(tensorboard=tensorboard, wandb_project=wandb_project)
    wanted: list[tuple[str, Callable[[], MetricsSink]]] = []
    if tensorboard:
        wanted.append(("TensorBoard", lambda: TensorBoardSink(run_dir / "tensorboard")))
    if wandb_project:
        wanted.append(("Weights & Biases", lambda: WandbSink(wandb_project, run_id, run_name, run_dir, config)))
    sinks: list[MetricsSink] = [JsonlSink(run_dir / "metrics.jsonl")]
    for name, opened in wanted:
        try:
            sinks.append(Guarded(opened(), name, report))
        except Exception as error:  # whatever a third party raises must not reach the run
            report(f"{name} could not be opened, the run goes on without it: {error!r}")
    return sinks


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """Every number of a line under the names dashboards group by: ``section/name``; unknown values are left out."""
    return dict(_scalars(metrics))


_SECTION_OF = {
    "reward": ("reward_mean", "reward_trained_mean", "eval_reward"),
    "staleness": ("staleness_min", "staleness_mean", "staleness_max", "staleness_bound", "staleness_bound_tight"),
    "time": (
        "bubble_ratio", "idle_s", "t_train_s", "t_bcast_s", "t_bcast_predicted_s", "t_bcast_bound_s", "elapsed_s",
    ),
    "pool": ("mu_pool_per_s", "mu_target_per_s", "mu_min_per_s", "mu_min_overlapped_per_s", "workers_active"),
    "rows": ("generated", "trained", "expired", "refused", "buffered", "failed", "unattributed"),
    "rescoring": ("rescored", "rescored_differing", "rescoring_failed", "workers_set_aside"),
    "audit": ("mismatch_mean_nats",),
    "groups": ("groups_dropped", "zero_variance_groups"),
    "length": ("length_mean", "truncated_share", "expired_length_mean"),
    "cost": ("cost_usd", "step_cost_usd", "usd_per_h"),
    "snapshot": ("snapshot_bytes", "publish_bytes", "delta_share", "changed_share"),
    "relay": ("seed_sent_bytes", "workers_sent_bytes", "reparentings"),
}  # fmt: skip


def _scalars(metrics: StepMetrics) -> Iterator[tuple[str, float]]:
    for section, fields in _SECTION_OF.items():
        for field in fields:
            value = getattr(metrics, field)
            if value is not None:
                yield f"{section}/{field}", float(value)
    for section, group in (
        ("reward_by_task", metrics.reward_by_task),
        ("rows_by_task", metrics.rows_by_task),
        ("pass_share_by_task", metrics.pass_share_by_task),
        ("refused_by", metrics.refused_by),
        ("learner", metrics.learner),
    ):
        for name, value in group.items():
            yield f"{section}/{name}", float(value)
