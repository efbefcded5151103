from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes

from echo2.report.figure import MAX_POINTS, SERIES, draw, smooth, thin


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5000))
def test_thinning_keeps_the_ends_and_the_limit(count: int) -> None:
    kept = thin([0.0] * count)
    assert len(kept) == min(count, MAX_POINTS)
    assert kept == sorted(set(kept))
    if count:
        assert (kept[0], kept[-1]) == (0, count - 1)


def test_smoothing_does_not_lean_on_the_first_value() -> None:
    assert smooth([5.0] * 9, 4) == pytest.approx([5.0] * 9)
    assert smooth([0.0, 1.0], 4) == pytest.approx([0.0, 1 / 1.75])


def test_the_same_numbers_give_the_same_drawing_and_labels_are_plain_text() -> None:
    def once() -> tuple[str, tuple[tuple[str, str, str], ...]]:
        drawing = draw(
            lambda axes: axes.plot([0, 1], [0.1, 0.2], color=SERIES[0], linestyle="--", label="$x<y$"),  # type: ignore[arg-type]
            unit="cost in $ & <b>",
        )
        return drawing.svg, tuple(drawing.keys)

    svg, keys = once()
    assert (svg, keys) == once()
    assert keys == (("$x<y$", "var(--c1)", "dashed"),)
    assert "cost in $ &amp; &lt;b&gt;" in svg
    assert svg.startswith("<svg")


@pytest.mark.parametrize("values", [(1.04, 1.63), (2.1, 269.0), (0.0021, 26_900.0)])
def test_a_logarithmic_axis_writes_plain_numbers(values: tuple[float, float]) -> None:
    def paint(axes: Axes) -> None:
        axes.plot([0, 1], values, color=SERIES[0])
        axes.set_yscale("log")

    svg = draw(paint, unit="MB").svg
    assert "$" not in svg
    assert "math" not in svg
    assert len(re.findall(r"<text", svg)) >= 5
