"""What a person sees while a run runs.

Invariant: the line shows only numbers that arrived; what is not known yet is a dash. On a terminal it is one line that
renews itself. Elsewhere it is one plain line for each step and each change of phase, so that a log stays readable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from echo2.metrics import StepMetrics
from echo2.transport.messages import RunStatus

QUIET_PHASES = frozenset({"", "training", "waiting for trajectories"})
"""Phases that alternate within every step: in a log they need no words beside the numbers."""


class Progress:
    """The live line; a context manager. ``show`` takes the newest status and metrics line, as often as it likes."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._metrics: StepMetrics | None = None
        self._steps = 0
        self._phase = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=True, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last step's line where it is and give the terminal back."""
        if self._live is not None:
            self._live.update(Text("" if self._metrics is None else progress_line(self._metrics, self._steps)))
            self._live.stop()
            self._live = None

    def show(self, status: RunStatus, metrics: StepMetrics | None) -> None:
        """Show the run as it is now; a repeated state prints nothing new."""
        new_step = metrics is not None and (self._metrics is None or metrics.step != self._metrics.step)
        self._metrics = metrics if metrics is not None else self._metrics
        self._steps = status.steps
        if self._live is not None:
            self._live.update(_renewing(status.phase, status.problem, self._metrics, status.steps))
        elif new_step and metrics is not None:
            self._print(progress_line(metrics, status.steps))
        else:
            self._print_phase(status.phase)

    def waiting(self, phase: str) -> None:
        """Show what is going on before the coordinator can be asked."""
        if self._live is not None:
            self._live.update(_renewing(phase, "", None, 0))
        else:
            self._print_phase(phase)

    def message(self, text: str) -> None:
        """A line that stays, above the live one."""
        self._print(text)

    def _print_phase(self, phase: str) -> None:
        if phase != self._phase and phase not in QUIET_PHASES:
            self._print(phase)
            self._phase = phase

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def progress_line(metrics: StepMetrics, steps: int) -> str:
    """One step in one line.

    Example: ``step  12/100  reward 0.531  staleness 1.2 (max 3)  bubble  4%  pool 12.1/s, target 10.8/s  $0.02``.
    """
    width = len(str(steps))
    target = "" if metrics.mu_target_per_s is None else f", target {rate(metrics.mu_target_per_s)}/s"
    return (
        f"step {metrics.step + 1:{width}d}/{steps}  reward {metrics.reward_mean:.3f}  "
        f"staleness {metrics.staleness_mean:.1f} (max {metrics.staleness_max})  bubble {metrics.bubble_ratio:3.0%}  "
        f"pool {rate(metrics.mu_pool_per_s)}/s{target}  {usd(metrics.cost_usd)}"
    )


def summary(lines: Sequence[StepMetrics], report: Path | None) -> str:
    """A few lines that end a run: what it learned, how stale its data was, what it cost, where to read more."""
    if not lines:
        return "The run ended before its first training step."
    first, last = lines[0], lines[-1]
    span = min(5, len(lines))
    start, end = (_mean_reward(lines[:span]), _mean_reward(lines[-span:]))
    trained = (
        f"{last.generated} generated = {last.trained} trained + {last.buffered} buffered + {last.expired} expired + "
        f"{last.refused} refused + {last.failed} failed"
    )
    rows = {
        "steps": f"{first.step + 1} to {last.step + 1} in {duration(last.elapsed_s)}",
        "reward": f"{start:.3f} → {end:.3f} (mean of the first and last {span} steps)",
        "staleness": f"mean {_mean([m.staleness_mean for m in lines]):.2f}, max {max(m.staleness_max for m in lines)}",
        "bubble": f"{last.bubble_ratio:.1%} of the learner's time",
        "trajectories": trained,
        "cost": f"{usd(last.cost_usd)} at {usd(last.usd_per_h)}/h",
    }
    if report is not None:
        rows["report"] = str(report)
    return "\n".join(f"{name:<13}{text}" for name, text in rows.items())


def rate(per_s: float) -> str:
    """Three digits, and all of those before the point. Example: ``rate(21600.0) == '21,600'``."""
    return f"{per_s:.3g}" if per_s < 999.5 else f"{per_s:,.0f}"


def usd(amount: float) -> str:
    """Dollars with cents, and with more digits while they are few. Example: ``usd(0.0000364) == '$0.000036'``."""
    if not 0 < amount < 0.1:
        return f"${amount:,.2f}"
    return f"${amount:.{min(12, max(4, 1 - math.floor(math.log10(amount))))}f}"


def duration(seconds: float) -> str:
    """Example: ``duration(3725) == '1 h 2 min'``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _renewing(phase: str, reason: str, metrics: StepMetrics | None, steps: int) -> Table:
    words = Text()
    if metrics is not None:
        words.append(f"{progress_line(metrics, steps)}  ")
    words.append(phase, style="dim" if phase in QUIET_PHASES else "yellow")
    if reason and phase not in QUIET_PHASES:
        words.append(f"  {reason}", style="dim")
    line = Table.grid(padding=(0, 1))
    line.add_row(Spinner("dots", style="cyan"), words)
    return line


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_reward(lines: Sequence[StepMetrics]) -> float:
    return _mean([metrics.reward_mean for metrics in lines])
