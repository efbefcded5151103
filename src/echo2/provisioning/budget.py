"""What has been promised to be paid, and whether the budget allows it.

Invariant: as long as prices hold and a run that is told to end is over within ``end_s``, a run with a cap never costs
more than the cap: whatever is rented is counted with the time that ending takes and with its minimum rental.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from echo2.provisioning.capacity import SECONDS_PER_H
from echo2.provisioning.rules import Rules


class Liability(msgspec.Struct, frozen=True):
    """A machine that is paid for."""

    usd_per_h: float
    paid_until_s: float
    """Its minimum rental ends then; it is owed whenever the machine goes."""


class Standing(msgspec.Struct, frozen=True):
    """What is spent, and what goes on being spent."""

    now_s: float
    spent_usd: float
    learner_usd_per_h: float
    machines: tuple[Liability, ...]

    def committed_usd(self, horizon_s: float, more: Iterable[Liability] = ()) -> float:
        """By the time that everything has been given back, if that is ``horizon_s`` from now."""
        owed = (m.usd_per_h * max(horizon_s, m.paid_until_s - self.now_s) for m in (*self.machines, *more))
        return self.spent_usd + math.fsum((self.learner_usd_per_h * horizon_s, *owed)) / SECONDS_PER_H


def over(standing: Standing, rules: Rules) -> str | None:
    """Why the run must end now, or None. The next look is a decision period away, and ending takes its time."""
    if rules.budget_usd <= 0:
        return None
    committed = standing.committed_usd(rules.period_s + rules.end_s)
    if committed < rules.budget_usd:
        return None
    return (
        f"the budget of {rules.budget_usd:g} USD must pay for the end too: {standing.spent_usd:.4g} USD are spent, and "
        f"ending in order within {rules.end_s:g} s from the next decision on brings it to {committed:.4g} USD"
    )


def affords(standing: Standing, more: Iterable[Liability], rules: Rules) -> bool:
    """Whether these machines too could start and the run still end within the budget."""
    horizon_s = rules.start_s + rules.period_s + rules.end_s
    return rules.budget_usd <= 0 or standing.committed_usd(horizon_s, more) < rules.budget_usd
