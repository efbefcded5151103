"""What every chart of a report is made of.

Invariant: a line has the points that were measured, thinned so that its shape stays; it has no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from echo2.metrics import StepMetrics
from echo2.report.figure import Drawing, thin

Lines = Sequence[StepMetrics]


class Chart(NamedTuple):
    title: str
    caption: str
    drawing: Drawing


def line(axes: Axes, lines: Lines, value: Callable[[StepMetrics], float | None], **style: object) -> None:
    points = [(m.step, v) for m in lines if (v := value(m)) is not None and math.isfinite(v)]
    kept = [points[index] for index in thin([v for _, v in points])]
    if kept:
        style = {"marker": "." if len(kept) < 3 else "", **style}
        axes.plot([step for step, _ in kept], [v for _, v in kept], **style)  # type: ignore[arg-type]
