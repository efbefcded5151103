"""Who did what when: the paper's Figure 1, of a real run.

Invariant: pure; read off the coordinator's events alone. An event that lacks what it should have is left out, and a bar
whose end was not seen is drawn to the end of the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from echo2.report.chart import Chart
from echo2.report.figure import SERIES, SHADES, draw_wide

STEPS_SHOWN = 12
"""Newest training steps in the window; more would be stripes."""
WORKERS_SHOWN = 8
"""Those that held most leases in it."""

Event = Mapping[str, Any]


class Bar(NamedTuple):
    start_s: float
    end_s: float
    age: int
    """Training steps by which the policy at work was behind the learner; 0 for the learner's own bars."""


class Timeline(NamedTuple):
    from_s: float
    to_s: float
    training: list[Bar]
    travelling: list[Bar]
    """From the end of a step until most workers had its weights."""
    generating: dict[str, list[Bar]]
    """By worker."""


def timeline(events: Sequence[Event]) -> Timeline | None:
    """The last steps of a run; None where none was trained."""
    timed = [event for event in events if isinstance(event.get("wall_time"), int | float)]
    training = _training(timed)
    if not training:
        return None
    shown = training[-STEPS_SHOWN:]
    from_s, to_s = shown[0].start_s, shown[-1].end_s
    generating = {name: _inside(bars, from_s, to_s) for name, bars in _generating(timed, training).items()}
    busiest = sorted(generating, key=lambda name: (-len(generating[name]), name))[:WORKERS_SHOWN]
    return Timeline(
        from_s,
        to_s,
        shown,
        _inside(_travelling(timed), from_s, to_s),
        {name: generating[name] for name in sorted(busiest) if generating[name]},
    )


def timeline_chart(events: Sequence[Event]) -> Chart | None:
    found = timeline(events)
    if found is None:
        return None

    def paint(axes: Axes) -> None:
        rows = [("learner", found.training), ("broadcast", found.travelling), *found.generating.items()]
        for place, (label, bars) in enumerate(rows):
            for bar in bars:
                colour = SERIES[place] if place < 2 else SHADES[min(bar.age, len(SHADES) - 1)]
                span = [(bar.start_s - found.from_s, bar.end_s - bar.start_s)]
                axes.broken_barh(span, (place - 0.36, 0.72), facecolors=colour, linewidth=0)
            axes.text(-0.005, place, label, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7)
        axes.set_yticks([])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, found.to_s - found.from_s)

    caption = (
        f"The last {len(found.training)} steps. The learner trains where its row is filled and waits elsewhere. "
        "Weights travel from the end of a step until most of the pool has them. The darker a group, the more steps the "
        "policy that generates it is behind."
    )
    return Chart("Timeline", caption, draw_wide(paint, unit="seconds", rows=2 + len(found.generating)))


def _training(events: Iterable[Event]) -> list[Bar]:
    began: dict[Any, float] = {}
    bars = []
    for event in events:
        if event.get("kind") == "batch":
            began.setdefault(event.get("step"), event["wall_time"])
        elif event.get("kind") == "step" and event.get("step") in began:
            bars.append(Bar(began.pop(event["step"]), event["wall_time"], 0))
    return bars


def _travelling(events: Iterable[Event]) -> list[Bar]:
    bars = []
    for event in events:
        took_s = event.get("t_bcast_s")
        if event.get("kind") == "disseminated" and isinstance(took_s, int | float):
            bars.append(Bar(event["wall_time"] - took_s, event["wall_time"], 0))
    return bars


def _generating(events: Iterable[Event], training: Sequence[Bar]) -> dict[str, list[Bar]]:
    """Leases from grant to submission; those that were lost are left out."""
    ends = [bar.end_s for bar in training]
    names: dict[Any, str] = {}
    granted: dict[Any, tuple[float, int]] = {}
    found: dict[str, list[Bar]] = {}
    done = 0
    for event in events:
        at_s, worker = event["wall_time"], event.get("worker")
        while done < len(ends) and ends[done] <= at_s:
            done += 1
        match event.get("kind"):
            case "worker_joined":
                names[worker] = str(event.get("name") or worker)
            case "lease":
                version = str(event.get("policy")).rpartition(".")[2]
                granted[event.get("lease")] = (at_s, max(0, done - int(version)) if version.isdecimal() else 0)
            case "submit" if event.get("lease") in granted:
                began_s, age = granted.pop(event["lease"])
                found.setdefault(names.get(worker, str(worker)), []).append(Bar(began_s, at_s, age))
    return found


def _inside(bars: Iterable[Bar], from_s: float, to_s: float) -> list[Bar]:
    cut = (Bar(max(bar.start_s, from_s), min(bar.end_s, to_s), bar.age) for bar in bars)
    return [bar for bar in cut if bar.end_s > bar.start_s]
