"""One small chart as inline SVG.

Invariant: a chart carries no colours of its own. It is drawn with placeholder colours that are replaced by variables of
the page's style sheet, so that it follows the page into dark mode; its text is text, never mathematics, because labels
hold names from a user's configuration.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

INK, GRID = "#0a0a00", "#0a0a10"
SERIES = ("#0a0a21", "#0a0a22", "#0a0a23", "#0a0a24", "#0a0a25", "#0a0a26")
SHADES = ("#0a0a31", "#0a0a32", "#0a0a33", "#0a0a34", "#0a0a35", "#0a0a36", "#0a0a37", "#0a0a38")
"""From fresh to stale."""

_VARIABLES = {
    INK: "var(--ink)",
    GRID: "var(--grid)",
    **{colour: f"var(--c{place})" for place, colour in enumerate(SERIES, 1)},
    **{colour: f"var(--s{place})" for place, colour in enumerate(SHADES, 1)},
}
_PLACEHOLDER = re.compile("|".join(_VARIABLES))

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "echo2",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
    "xtick.major.size": 2,
    "lines.linewidth": 1.4,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

DECADE = 10.0
WIDTH_IN, HEIGHT_IN = 3.7, 1.75
"""About a phone's width at the text size of a page, so that charts need not shrink there."""

WIDE_IN, ROW_IN = 11.4, 0.24
"""A chart of rows over the whole width, and one of its rows."""

MAX_POINTS = 400
"""Drawn per line; more would make a page of megabytes that looks the same."""


class Key(NamedTuple):
    """One entry of a legend, which the page shows as text that wraps."""

    label: str
    colour: str
    """A CSS variable."""
    stroke: str
    """``solid``, ``dashed``, ``dotted`` or ``box``."""


class Drawing(NamedTuple):
    svg: str
    keys: tuple[Key, ...]


def draw(paint: Callable[[Axes], None], *, unit: str, whole: bool = False) -> Drawing:
    """Let ``paint`` fill the axes; return an ``<svg>`` element and the legend of what has a label.

    ``whole`` keeps the ticks of the vertical axis at integers.
    """

    def over_steps(axes: Axes) -> None:
        paint(axes)
        axes.set_xlabel("training step", fontsize=7.5)
        axes.set_ylabel(unit, fontsize=7.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=whole))
        if axes.get_yscale() == "log":
            _plain_ticks(axes)

    return _drawn(over_steps, WIDTH_IN, HEIGHT_IN)


def draw_wide(paint: Callable[[Axes], None], *, unit: str, rows: int) -> Drawing:
    """The same for ``rows`` rows of bars over an axis of ``unit``, as wide as the page."""

    def over_time(axes: Axes) -> None:
        paint(axes)
        axes.set_xlabel(unit, fontsize=7.5)
        axes.grid(False)

    return _drawn(over_time, WIDE_IN, ROW_IN * (rows + 2))


def _drawn(paint: Callable[[Axes], None], width_in: float, height_in: float) -> Drawing:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        handles, labels = axes.get_legend_handles_labels()
        buffer = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure)  # matplotlib leaves its printing methods untyped
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})
    keys = tuple(_key(handle, label) for handle, label in zip(handles, labels, strict=True))
    return Drawing(_inline(buffer.getvalue()), keys)


def _plain_ticks(axes: Axes) -> None:
    """Numbers where a logarithmic axis would write powers, which need mathematics; linear steps within a decade."""
    least, most = axes.get_ylim()
    if most >= DECADE * least:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < DECADE**2 * least else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _key(handle: Artist | Container, label: str) -> Key:
    if isinstance(handle, Line2D):
        stroke = {"--": "dashed", ":": "dotted", "None": "box"}.get(str(handle.get_linestyle()), "solid")
        return Key(label, _VARIABLES[str(handle.get_color())], stroke)
    bar = handle.get_children()[0]
    assert isinstance(bar, Patch)
    return Key(label, _VARIABLES[to_hex(bar.get_facecolor())], "box")


def thin(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Indices of at most ``limit`` points, first and last included, evenly between."""
    if len(values) <= limit:
        return list(range(len(values)))
    return sorted({round(place * (len(values) - 1) / (limit - 1)) for place in range(limit)})


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Exponential mean over about ``span`` values, without a bias towards the first one."""
    keep = 1 - 1 / max(1, span)
    weight, total, smoothed = 0.0, 0.0, []
    for value in values:
        weight, total = keep * weight + 1, keep * total + value
        smoothed.append(total / weight)
    return smoothed


def _inline(document: str) -> str:
    element = document[document.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)
    return _PLACEHOLDER.sub(lambda match: _VARIABLES[match[0]], element)
