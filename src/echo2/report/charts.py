"""The charts of a report: what to draw of a run's metrics.

Invariant: charts are pure functions of the metrics lines; a quantity that was never measured has no chart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from matplotlib.axes import Axes

from echo2.metrics import StepMetrics
from echo2.report.chart import Chart, Lines, line
from echo2.report.figure import INK, SERIES, SHADES, draw, smooth
from echo2.report.folder import EvalRecord
from echo2.report.learner_charts import learner_charts

MAX_COLUMNS = 80
"""Columns of the staleness chart; each pools the batches of neighbouring steps."""
MOST_OF_POOL = 3.0
"""Where the axis of the pool chart ends."""


def charts(lines: Lines, evals: Sequence[EvalRecord], staleness_budget: int | None) -> list[Chart]:
    """Every chart that ``lines`` has numbers for, in reading order."""
    if not lines:
        return []
    return [
        _reward(lines, evals),
        *_passes(lines),
        _staleness(lines, staleness_budget),
        _staleness_shares(lines),
        _bubble(lines),
        _times(lines),
        _pool(lines),
        _cost(lines),
        _step_cost(lines),
        _buffer(lines),
        _losses(lines),
        _length(lines),
        *_travel(lines),
        *learner_charts(lines),
    ]


def _reward(lines: Lines, evals: Sequence[EvalRecord]) -> Chart:
    tasks = sorted({task for m in lines for task in m.reward_by_task})
    span = max(3, min(25, len(lines) // 8))
    smoothed = dict(zip((m.step for m in lines), smooth([m.reward_mean for m in lines], span), strict=True))

    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.reward_mean, color=SERIES[0], alpha=0.3, linewidth=0.9)
        line(axes, lines, lambda m: smoothed[m.step], color=SERIES[0], label=f"smoothed over {span} steps")
        for place, task in enumerate(tasks[:4] if len(tasks) > 1 else []):
            colour = SERIES[2 + place]
            reward = partial(_of_task, "reward_by_task", task)
            line(axes, lines, reward, color=colour, linewidth=0.9, label=task)
        scored = [(e.version, e.reward_mean) for e in evals if e.reward_mean is not None]
        if scored:
            steps, rewards = zip(*scored, strict=True)
            axes.plot(steps, rewards, "o", color=SERIES[1], markersize=3.5, label="held out")

    caption = "Mean of all rows judged since the previous step, trained or not; faint: step by step."
    return Chart("Reward", caption, draw(paint, unit="mean reward"))


def _of_task(field: str, task: str, metrics: StepMetrics) -> float | None:
    found: float | None = getattr(metrics, field).get(task)
    return found


def _passes(lines: Lines) -> list[Chart]:
    tasks = sorted({task for m in lines for task in m.pass_share_by_task})
    if not tasks:
        return []

    def paint(axes: Axes) -> None:
        for place, task in enumerate(tasks[: len(SERIES)]):
            share = partial(_of_task, "pass_share_by_task", task)
            line(axes, lines, share, color=SERIES[place], linewidth=0.9, label=task)
        axes.set_ylim(-0.02, 1.02)

    return [Chart("Passes", "Share of the rows judged for a step that pass, by task.", draw(paint, unit="share"))]


def _staleness(lines: Lines, staleness_budget: int | None) -> Chart:
    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.staleness_max, color=SERIES[1], drawstyle="steps-mid", label="largest")
        line(axes, lines, lambda m: m.staleness_mean, color=SERIES[0], label="mean")
        line(axes, lines, lambda m: m.staleness_bound, color=SERIES[4], linestyle=":", label="plan (7)")
        line(axes, lines, lambda m: m.staleness_bound_tight, color=SERIES[2], linestyle="--", label="plan (12)")
        if staleness_budget is not None:
            axes.axhline(staleness_budget, color=INK, linewidth=0.8, alpha=0.7)
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (-2, 2)}
            axes.annotate(f"budget S = {staleness_budget}", (1, staleness_budget), ha="right", fontsize=7, **place)  # type: ignore[arg-type]
        axes.set_ylim(bottom=-0.1)

    caption = (
        "Learner version minus trajectory version in each batch. The budget is guaranteed; the plans ignore queues."
    )
    return Chart("Staleness", caption, draw(paint, unit="training steps", whole=True))


def _staleness_shares(lines: Lines) -> Chart:
    size = math.ceil(len(lines) / MAX_COLUMNS)
    columns = [lines[start : start + size] for start in range(0, len(lines), size)]
    pooled: list[dict[int, int]] = []
    for column in columns:
        counts: dict[int, int] = {}
        for metrics in column:
            for staleness, count in metrics.staleness_histogram.items():
                counts[int(staleness)] = counts.get(int(staleness), 0) + count
        pooled.append(counts)
    levels = sorted({staleness for counts in pooled for staleness in counts})
    top = max([1, *levels])

    def paint(axes: Axes) -> None:
        bottoms = [0.0] * len(columns)
        lefts, widths = [c[0].step - 0.5 for c in columns], [c[-1].step - c[0].step + 1 for c in columns]
        for level in levels:
            shares = [counts.get(level, 0) / max(1, sum(counts.values())) for counts in pooled]
            shade = SHADES[round(level / top * (len(SHADES) - 1))]
            label = str(level) if top <= 7 or level % 3 == 0 else None
            axes.bar(lefts, shares, widths, bottom=bottoms, align="edge", color=shade, label=label)
            bottoms = [below + share for below, share in zip(bottoms, shares, strict=True)]
        axes.set_ylim(0, 1)

    caption = "Share of each batch by staleness: from fresh to stale."
    return Chart("Staleness histogram", caption, draw(paint, unit="share of the batch"))


def _bubble(lines: Lines) -> Chart:
    def of_step(metrics: StepMetrics) -> float | None:
        total_s = metrics.idle_s + metrics.t_train_s
        return metrics.idle_s / total_s if total_s > 0 else None

    def paint(axes: Axes) -> None:
        line(axes, lines, of_step, color=SERIES[0], alpha=0.35, linewidth=0.9)
        line(axes, lines, lambda m: m.bubble_ratio, color=SERIES[0])
        axes.set_ylim(-0.02, 1.02)

    caption = (
        "Share of the learner's time spent waiting for admissible trajectories, since the start; faint: step by step."
    )
    return Chart("Bubble ratio", caption, draw(paint, unit="share of time"))


def _times(lines: Lines) -> Chart:
    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.t_train_s, color=SERIES[0], label="T_train")
        line(axes, lines, lambda m: m.t_bcast_s, color=SERIES[1], label="T_bcast")
        line(axes, lines, lambda m: m.t_bcast_predicted_s, color=SERIES[1], linestyle="--", label="transfer, planned")
        axes.set_ylim(bottom=0)

    caption = "A training step, and the way of a snapshot from the end of its step to most workers."
    return Chart("Step and dissemination time", caption, draw(paint, unit="seconds"))


def _pool(lines: Lines) -> Chart:
    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.mu_pool_per_s, color=SERIES[0], label="pool")
        line(axes, lines, lambda m: m.mu_target_per_s, color=SERIES[1], label="target")
        line(axes, lines, lambda m: m.mu_min_per_s, color=SERIES[1], linestyle="--", label="required (2)")
        line(axes, lines, lambda m: m.mu_min_overlapped_per_s, color=SERIES[2], linestyle="--", label="required (2')")
        # Where dissemination nearly fills the period a requirement has no end, and would flatten what there is.
        most = MOST_OF_POOL * max(m.mu_pool_per_s for m in lines)
        axes.set_ylim(0, min(axes.get_ylim()[1], most) if most else None)

    caption = (
        "What the active workers deliver against the target, gamma times what the chosen rule asks for at the measured "
        "times. (2) counts dissemination as lost time, (2') does not. The axis ends at three times the pool."
    )
    return Chart("Pool rate", caption, draw(paint, unit="trajectories/s"))


def _cost(lines: Lines) -> Chart:
    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.cost_usd, color=SERIES[2])
        axes.set_ylim(bottom=0)

    return Chart("Cost", "Price times time of the learner and of every worker.", draw(paint, unit="USD, cumulative"))


def _step_cost(lines: Lines) -> Chart:
    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.step_cost_usd, color=SERIES[2])
        axes.set_ylim(bottom=0)

    return Chart("Cost of a step", "Spent since the step before, waiting included.", draw(paint, unit="USD"))


def _buffer(lines: Lines) -> Chart:
    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.buffered, color=SERIES[0])
        axes.set_ylim(bottom=0)

    caption = "Trajectories admitted and not yet trained on, after each step."
    return Chart("Buffer", caption, draw(paint, unit="trajectories"))


def _losses(lines: Lines) -> Chart:
    def paint(axes: Axes) -> None:
        for place, state in enumerate(("expired", "refused", "failed")):
            line(axes, lines, attrgetter(state), color=SERIES[1 + place], label=state)
        axes.set_ylim(bottom=0)

    last = lines[-1]
    caption = f"Of {last.generated} generated trajectories, {last.trained} were trained on; these were not."
    return Chart("Trajectories not trained on", caption, draw(paint, unit="cumulative"))


def _length(lines: Lines) -> Chart:
    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.length_mean, color=SERIES[0], label="mean length")
        axes.set_ylim(bottom=0)
        share = axes.twinx()
        share.grid(False)
        share.tick_params(length=0)
        line(share, lines, lambda m: m.truncated_share, color=SERIES[1], linewidth=0.9)
        share.set_ylim(-0.02, 1.02)
        share.set_ylabel("share cut", fontsize=7.5)
        axes.plot([], [], color=SERIES[1], linewidth=0.9, label="cut at the limit (right)")

    return Chart("Length", "Sampled tokens per trajectory of the batch.", draw(paint, unit="tokens"))


def _travel(lines: Lines) -> list[Chart]:
    """What a publish sends, and who sends it on; nothing of a run that measured neither."""
    made = []
    if any(m.publish_bytes for m in lines):

        def paint_sizes(axes: Axes) -> None:
            line(axes, lines, lambda m: m.snapshot_bytes / 1e6, color=SERIES[0], label="snapshot")
            line(axes, lines, lambda m: m.publish_bytes / 1e6, color=SERIES[1], label="sent")
            axes.set_yscale("log")

        caption = "A snapshot, and the delta or anchor that its publish sent."
        made.append(Chart("Size of a publish", caption, draw(paint_sizes, unit="MB")))
    if any(m.seed_sent_bytes for m in lines):

        def paint_senders(axes: Axes) -> None:
            line(axes, lines, lambda m: m.seed_sent_bytes / 1e6, color=SERIES[0], label="coordinator")
            line(axes, lines, lambda m: m.workers_sent_bytes / 1e6, color=SERIES[2], label="workers")
            axes.set_ylim(bottom=0)

        caption = "What the relays of coordinator and workers have sent."
        made.append(Chart("Who carries snapshots", caption, draw(paint_senders, unit="MB, cumulative")))
    return made
