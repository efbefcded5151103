"""The paper's Figure 1, of a run's own events."""

from __future__ import annotations

from typing import Any

from echo2.report.timeline import STEPS_SHOWN, WORKERS_SHOWN, Bar, timeline, timeline_chart


def event(at_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"wall_time": at_s, "kind": kind, **fields}


def a_run(steps: int) -> list[dict[str, Any]]:
    """Steps of 10 s, one after another; weights take 4 s; a group of 6 s in each step, under the newest weights."""
    events = [event(0.0, "worker_joined", worker="w1", name="near")]
    for step in range(steps):
        at_s = 10.0 * step
        events += [
            event(at_s, "batch", step=step),
            event(at_s + 1, "lease", lease=f"l{step}", worker="w1", policy=f"0.{step // 2 * 2}"),
            event(at_s + 4, "disseminated", policy=f"0.{step}", t_bcast_s=4.0),
            event(at_s + 7, "submit", lease=f"l{step}", worker="w1"),
            event(at_s + 10, "step", step=step),
        ]
    return events


def test_training_travelling_and_generating_are_read_off_the_events() -> None:
    found = timeline(a_run(3))
    assert found is not None
    assert found.training == [Bar(0.0, 10.0, 0), Bar(10.0, 20.0, 0), Bar(20.0, 30.0, 0)]
    assert found.travelling == [Bar(0.0, 4.0, 0), Bar(10.0, 14.0, 0), Bar(20.0, 24.0, 0)]
    assert found.generating == {"near": [Bar(1.0, 7.0, 0), Bar(11.0, 17.0, 1), Bar(21.0, 27.0, 0)]}


def test_only_the_last_steps_are_shown() -> None:
    found = timeline(a_run(STEPS_SHOWN + 5))
    assert found is not None
    assert len(found.training) == STEPS_SHOWN
    assert min(bar.start_s for bars in found.generating.values() for bar in bars) >= found.from_s


def test_of_many_workers_the_busiest_are_shown() -> None:
    events = a_run(2)
    for number in range(WORKERS_SHOWN + 3):
        worker = f"late{number:02d}"
        events += [
            event(12.0, "lease", lease=worker, worker=worker, policy="0.0"),
            event(13.0, "submit", lease=worker, worker=worker),
        ]
    found = timeline(sorted(events, key=lambda e: e["wall_time"]))
    assert found is not None
    assert len(found.generating) == WORKERS_SHOWN
    assert "near" in found.generating


def test_events_that_lack_something_are_left_out() -> None:
    broken: list[dict[str, Any]] = [
        {"kind": "step", "step": 1}, event(1.0, "step"), event(2.0, "lease"), event(3.0, "submit", lease="unknown"),
        event(3.5, "disseminated", t_bcast_s="soon"), {"wall_time": "noon", "kind": "batch"},
    ]  # fmt: skip
    assert timeline(broken) is None
    assert timeline_chart(broken) is None
    assert timeline([*broken, *a_run(1)]) is not None


def test_the_chart_has_a_row_for_each() -> None:
    chart = timeline_chart(a_run(4))
    assert chart is not None
    for label in ("learner", "broadcast", "near", "seconds"):
        assert f">{label}<" in chart.drawing.svg
