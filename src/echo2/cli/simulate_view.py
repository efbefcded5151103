"""What ``echo2 simulate`` shows people."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from echo2.report.progress import duration, rate, usd
from echo2.simulation.outcome import Outcome, Spread
from echo2.simulation.scenario import Scenario

_BLOCKS = " ▁▂▃▄▅▆▇█"


def view(scenario: Scenario, outcome: Outcome, *, plain: bool = False) -> Table:
    """plain: in ASCII."""
    title = Text(f"{scenario.name}, seed {scenario.world.seed}", style="bold")
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(scenario, outcome, plain):
        table.add_row(name, value)
    return table


def _rows(scenario: Scenario, outcome: Outcome, plain: bool) -> list[tuple[str, str]]:
    rows = [("steps", _steps(scenario, outcome)), ("bubble", _bubble(scenario, outcome))]
    if outcome.t_train_s is not None:
        rows.append(("T_train", _spread(outcome.t_train_s)))
    rows.append(("T_bcast", "no publish arrived" if outcome.t_bcast_s is None else _spread(outcome.t_bcast_s)))
    if (stale := outcome.staleness) is not None:
        rows.append(("staleness", f"mean {stale.mean:.2f}, max {stale.max} of S = {scenario.config.staleness_budget}"))
        rows.append(("", _histogram(stale.histogram, plain)))
    if outcome.workers_active_mean is not None:
        rows.append(("workers", f"{outcome.workers_active_mean:.1f} active on average{_changes(outcome)}"))
    if outcome.mu_pool_per_s is not None:
        target = "" if outcome.mu_target_per_s is None else f", target {rate(outcome.mu_target_per_s)}/s"
        rows.append(("pool", f"{rate(outcome.mu_pool_per_s)}/s{target}"))
    if outcome.cost_usd_per_step is not None:
        rows.append(("cost", f"{usd(outcome.cost_usd)}, {usd(outcome.cost_usd_per_step)} a step"))
    rows.append(("trajectories", _trajectories(outcome)))
    return rows


def _steps(scenario: Scenario, outcome: Outcome) -> str:
    told = f"{outcome.steps} in {duration(outcome.virtual_s)}"
    if outcome.step_s is not None:
        told += f", one every {outcome.step_s:.4g} s"
    if outcome.stopped:
        told += f"; ended before step {scenario.config.run.steps}: {outcome.stopped}"
    return told


def _bubble(scenario: Scenario, outcome: Outcome) -> str:
    told = f"{outcome.bubble_ratio:.1%}"
    if scenario.world.warm_up_steps and outcome.bubble_ratio_settled is not None:
        told += f", {outcome.bubble_ratio_settled:.1%} after the first {scenario.world.warm_up_steps} steps"
    return told


def _spread(spread: Spread) -> str:
    return f"{spread.p50:.4g} s (90 % within {spread.p90:.4g} s, longest {spread.max:.4g} s)"


def _histogram(counts: dict[str, int], plain: bool) -> str:
    """Trajectories by age; what belongs together is not broken."""
    most = max(counts.values())
    bars = "" if plain else _BLOCKS
    return "  ".join(
        f"{age}:{bars and bars[max(1, round(8 * count / most))]}{count:,}" for age, count in counts.items()
    )


def _changes(outcome: Outcome) -> str:
    changes = (("ordered", outcome.activations), ("released", outcome.releases), ("lost", outcome.losses))
    told = ", ".join(f"{count} {what}" for what, count in changes if count)
    return f" ({told})" if told else ""


def _trajectories(outcome: Outcome) -> str:
    parts = ((outcome.trained, "trained"), (outcome.buffered, "buffered"), (outcome.expired, "expired"),
             (outcome.refused, "refused"), (outcome.failed, "failed"))  # fmt: skip
    return f"{outcome.generated:,} = " + (" + ".join(f"{count:,} {what}" for count, what in parts if count) or "0")
