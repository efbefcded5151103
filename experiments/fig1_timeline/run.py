"""Figure 1: who does what when, with S = 3 and kappa = 2.

``python experiments/fig1_timeline/run.py`` plays the scenario beside this file in virtual time and draws the report's
own timeline of it as ``timeline.svg``; ``results.json`` has the age of every batch, which the paper states for this
figure.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import common
from matplotlib import colormaps
from matplotlib.axes import Axes

from echo2.report.timeline import Timeline, timeline
from echo2.simulation.play import Played
from echo2.simulation.programs import COORDINATOR

HERE = Path(__file__).parent
SCENARIO = common.scenario(HERE)
SMALLEST = SCENARIO["run"]["steps"]
SHADES = 5


def rows(done: Played) -> list[dict[str, Any]]:
    """A row for each training step."""
    return [
        {
            "steps": len(done.run.metrics), "step": line.step, "staleness_min": line.staleness_min,
            "staleness_max": line.staleness_max, "idle_s": line.idle_s, "t_bcast_s": line.t_bcast_s,
        }
        for line in done.run.metrics
    ]  # fmt: skip


def row(steps: int) -> dict[str, Any]:
    """Of the last step."""
    return rows(common.played(SCENARIO, {"run.steps": steps}))[-1]


def seen(done: Played) -> Timeline:
    told = [{**event, "wall_time": event["at_s"]} for event in done.run.events if event["who"] == COORDINATOR]
    found = timeline(told)
    assert found is not None, "steps were trained"
    return found


def draw(found: Timeline) -> None:
    shades = colormaps["viridis_r"]

    def paint(axes: Axes) -> None:
        lines = [("learner", found.training), ("broadcast", found.travelling), *found.generating.items()]
        for place, (_, bars) in enumerate(lines):
            for bar in bars:
                colour = ("C0", "C1")[place] if place < 2 else shades((bar.age + 1) / SHADES)
                span = [(bar.start_s - found.from_s, bar.end_s - bar.start_s)]
                axes.broken_barh(span, (place - 0.36, 0.72), facecolors=colour, edgecolor="white", linewidth=0.5)
        axes.set_yticks(range(len(lines)), labels=[label for label, _ in lines])
        axes.set(ylim=(len(lines) - 0.5, -0.5), xlabel="seconds; T_train is 100 s")
        axes.set_title("S = 3, kappa = 2: the darker a group, the older the policy that generates it")

    common.draw(HERE / "timeline.svg", paint, width_in=11.0, height_in=3.2)


def main() -> None:
    done = common.played(SCENARIO)
    common.write(HERE, {"outcome": done.outcome, "rows": rows(done)})
    draw(seen(done))
    for line in common.read(HERE)["rows"]:
        print(line)


if __name__ == "__main__":
    main()
