"""Charts of what the learner says of itself: losses and ratios, speed, and where its time goes.

Invariant: as of every chart: what was never measured, or was 0 throughout, has none.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from echo2.metrics import StepMetrics
from echo2.report.chart import Chart, Lines, line
from echo2.report.figure import GRID, SERIES, draw

TITLES = {
    "kl": ("KL to the initial policy", "nats per token"),
    "entropy": ("Entropy of the policy", "nats per token"),
    "clip_share": ("Clipped tokens", "share"),
    "ratio_mean": ("Mean ratio to the proximal policy", "ratio"),
    "weight_mean": ("Mean truncated importance weight", "weight"),
    "grad_norm": ("Gradient norm", "norm"),
    "loss": ("Loss", "loss"),
    "sampler_ratio": ("Learner against sampler at the same version", "ratio"),
    "tokens_per_s": ("Loss-bearing tokens trained in a second", "tokens per s"),
    "mfu": ("Model FLOPs utilisation", "share of the device's"),
    "trainable_tokens": ("Loss-bearing tokens of a step", "tokens"),
}
TIMES = {
    "audit and packing": ("audit_s", "pack_s"),
    "log-probs: proximal, reference": ("prox_s", "reference_s"),
    "forward and backward": ("update_s",),
    "optimizer": ("optimizer_s",),
    "snapshot: copy, wait for the one before": ("snapshot_s", "publish_wait_s"),
}
"""Statistics in seconds of a step, by what they were spent on."""


def learner_charts(lines: Lines) -> list[Chart]:
    made = [_time_split(lines)] if any(_spent(names, m) for names in TIMES.values() for m in lines) else []
    for name, (title, unit) in TITLES.items():
        if not any(m.learner.get(name) for m in lines):
            continue  # Not measured, or switched off: KL without a weight is 0 throughout.

        def paint(axes: Axes, name: str = name) -> None:
            values = [m.learner.get(name) for m in lines]
            if len({v for v in values if v is not None}) == 1:
                axes.axhline(0, color=GRID, linewidth=0)
            line(axes, lines, lambda m: m.learner.get(name), color=SERIES[4])

        made.append(Chart(title, f"Learner statistic {name}.", draw(paint, unit=unit)))
    return made


def _spent(names: tuple[str, ...], metrics: StepMetrics) -> float | None:
    measured = [metrics.learner[name] for name in names if name in metrics.learner]
    return sum(measured) if measured else None


def _time_split(lines: Lines) -> Chart:
    def paint(axes: Axes) -> None:
        line(axes, lines, lambda m: m.idle_s, color=SERIES[0], label="waiting for a batch")
        for color, (label, names) in zip(SERIES[1:], TIMES.items(), strict=True):
            if any(_spent(names, m) for m in lines):
                line(axes, lines, lambda m, names=names: _spent(names, m), color=color, label=label)  # type: ignore[misc]
        axes.set_ylim(bottom=0)

    caption = "The learner's own clock; what a snapshot took of training is told with the step after it."
    return Chart("Where a step's time goes", caption, draw(paint, unit="seconds"))
