"""Orders for machines, as far as the budget goes, with their reasons.

Invariant: an id is given once, and never to a machine that somebody else named so; nothing is ordered that could not
start and still be paid for to the end of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from echo2.provisioning import budget
from echo2.provisioning.budget import Liability
from echo2.provisioning.capacity import SECONDS_PER_H
from echo2.provisioning.decisions import Activate
from echo2.provisioning.offers import Offer, effective_usd_per_h
from echo2.provisioning.roster import Roster, Start
from echo2.provisioning.rules import Rules
from echo2.provisioning.view import View

Picks = Sequence[tuple[Offer, int]]


def place(view: View, roster: Roster, picks: Picks, why: str, rules: Rules) -> tuple[Roster, tuple[Activate, ...]]:
    """Order what the budget allows of ``picks``, in their order; none where it allows nothing."""
    numbers, taken = count(roster.ordered + 1), {machine.machine_id for machine in view.seen.machines}
    starts: dict[str, Start] = {}
    decisions: list[Activate] = []
    last = roster.ordered
    for offer, machines in picks:
        start = _start(view, offer, rules)
        names: list[str] = []
        for _ in range(machines):
            owed = [Liability(s.usd_per_h, s.paid_until_s) for s in (*starts.values(), start)]
            if not budget.affords(view.standing, owed, rules):
                break
            last = next(number for number in numbers if f"{offer.name}-{number}" not in taken)
            names.append(f"{offer.name}-{last}")
            starts[names[-1]] = start
        if names:
            decisions.append(_decision(view, offer, start, names, why))
    return roster.order(starts, last), tuple(decisions)


def why_nothing(view: View, picks: Picks, rules: Rules) -> str:
    """Why ``place`` ordered nothing."""
    if picks:
        return (
            f"of the budget of {rules.budget_usd:g} USD, {view.standing.spent_usd:.4g} USD are spent and the rest must "
            "pay for what runs and for the end"
        )
    return "; ".join(view.open.closed) or "there are no offers"


def _start(view: View, offer: Offer, rules: Rules) -> Start:
    now_s = view.seen.now_s
    return Start(
        offer.name,
        offer.expected_rollouts_per_s,
        effective_usd_per_h(offer, rules.terms),
        now_s + rules.start_s,
        now_s + offer.min_rental_h * SECONDS_PER_H,
    )


def _decision(view: View, offer: Offer, start: Start, names: Sequence[str], why: str) -> Activate:
    price = view.open.prices[offer.name]
    age_s = max(0.0, view.seen.now_s - price.at_s)
    terms = (
        f"{len(names)} of {offer.name} at {price.usd_per_h:.4g} USD/h (the price of {age_s:.0f} s ago) and "
        f"{start.expected_per_s:.3g} trajectories/s each, {start.usd_per_h / start.expected_per_s:.3g} USD/h per "
        "trajectory/s"
    )
    return Activate(
        offer.name, tuple(names), price.usd_per_h, price.at_s, start.start_by_s, f"{why}; activates {terms}"
    )
