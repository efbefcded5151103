from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from echo2.metrics import StepMetrics
from echo2.report.progress import Progress, duration, progress_line, summary, usd
from echo2.transport.messages import RunStatus

Make = Callable[..., StepMetrics]
MakeStatus = Callable[..., RunStatus]


def test_the_line_shows_step_reward_staleness_bubble_pool_and_cost(make_metrics: Make) -> None:
    metrics = make_metrics(
        11,
        reward_mean=0.5312,
        staleness_mean=1.2,
        bubble_ratio=0.04,
        mu_pool_per_s=12.1,
        mu_target_per_s=9.84,
        cost_usd=0.02,
    )
    assert progress_line(metrics, 100) == (
        "step  12/100  reward 0.531  staleness 1.2 (max 3)  bubble  4%  pool 12.1/s, target 9.84/s  $0.0200"
    )


def test_without_a_terminal_each_step_and_each_wait_is_one_plain_line(
    make_metrics: Make, make_status: MakeStatus
) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False, width=60)) as progress:
        progress.waiting("starting the coordinator")
        progress.show(make_status(phase="waiting for a learner", problem="no policy yet"), None)
        progress.show(make_status(phase="waiting for a learner", problem="the gate is closed"), None)
        progress.show(make_status(phase="waiting for trajectories"), None)
        progress.show(make_status(), make_metrics(0))
        progress.show(make_status(), make_metrics(0))
        progress.message("worker far[bold]away joined")
        progress.show(make_status(), make_metrics(1))
    lines = out.getvalue().splitlines()
    assert [line.partition("  reward")[0] for line in lines] == [
        "starting the coordinator",
        "waiting for a learner",
        "step   1/100",
        "worker far[bold]away joined",
        "step   2/100",
    ]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_line_renews_and_the_last_one_stays(make_metrics: Make, make_status: MakeStatus) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=160, _environ={})) as progress:
        progress.show(make_status(phase="waiting for a worker"), None)
        progress.show(make_status(), make_metrics(0))
        progress.show(make_status(phase="draining", problem="stopped by the operator"), make_metrics(1))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert text.splitlines()[-1].startswith("step   2/100")


def test_the_summary_compares_the_first_steps_with_the_last(make_metrics: Make) -> None:
    lines = [make_metrics(step, reward_mean=0.3 if step < 5 else 0.9) for step in range(10)]
    text = summary(lines, Path("runs/demo/report.html"))
    assert "reward       0.300 → 0.900 (mean of the first and last 5 steps)" in text
    assert "max 3" in text
    assert text.endswith("report       runs/demo/report.html")


def test_a_run_that_trained_nothing_says_so() -> None:
    assert summary([], None) == "The run ended before its first training step."


def test_small_sums_keep_their_digits() -> None:
    assert [usd(0), usd(0.0123), usd(1234.5)] == ["$0.00", "$0.0123", "$1,234.50"]
    assert [usd(0.0000364), usd(0.00005), usd(1e-30)] == ["$0.000036", "$0.000050", "$0.000000000000"]


def test_durations_read_as_words() -> None:
    assert [duration(5.4), duration(65), duration(3725)] == ["5 s", "1 min 5 s", "1 h 2 min"]
