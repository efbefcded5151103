"""Which machines a pool can do without, and which ones others could replace at much less.

Invariant: whatever is released, what stays active delivers more than the target by the band and, two deviations below
its mean, still the target. Nothing that is only on its way counts, nothing is released within its minimum rental (it
would be paid for all the same), and nothing that costs nothing.
"""

from __future__ import annotations

import math
from random import Random

import msgspec

from echo2.provisioning.market import choose
from echo2.provisioning.observation import Machine
from echo2.provisioning.offers import Offer, effective_usd_per_h
from echo2.provisioning.rates import pooled
from echo2.provisioning.rules import Requirement, Rules
from echo2.provisioning.view import SLACK, View

BAND = 0.05
"""What stays must exceed the target by this share: between it and the target nothing happens (I03)."""
_SURE_DEVIATIONS = 2.0
_LOOKED_AT = 8
"""Dearest machines for which a replacement is looked for."""


class Replacement(msgspec.Struct, frozen=True):
    machine_id: str
    picks: list[tuple[Offer, int]]
    reason: str


def unit_cost(machine: Machine) -> float:
    """rho: USD per hour for a trajectory per second; infinite for a machine that delivers nothing."""
    return machine.usd_per_h / machine.rate.mean_per_s if machine.rate.mean_per_s > 0 else math.inf


def releasable(view: View, need: Requirement, rules: Rules) -> list[str]:
    """Machines that can go together: the dearest first, each if what then stays is enough."""
    staying = dict(view.active)
    found = []
    for machine in _by_cost(view, rules):
        if view.pool.mean_per_s < need.mu_target_per_s * (1 + BAND):
            break
        rest = {name: other for name, other in staying.items() if name != machine.machine_id}
        if _enough(rest, need):
            staying = rest
            found.append(machine.machine_id)
    return found


def replacement(view: View, need: Requirement, rules: Rules) -> Replacement | None:
    """Machines that would deliver what a dear one does, for at least ``Rules.saving`` less; None where there are none.

    ``random`` (NoCost) does not look at costs.
    """
    if rules.policy == "random":
        return None
    for machine in _by_cost(view, rules)[:_LOOKED_AT]:
        rest = pooled(other.rate for name, other in view.active.items() if name != machine.machine_id)
        enough = max(
            need.mu_target_per_s * (1 + BAND), need.mu_target_per_s + _SURE_DEVIATIONS * math.sqrt(rest.variance)
        )
        missing = enough - rest.mean_per_s
        picks = choose(view.open.offers, missing, rules, 0) if missing > 0 else []
        brought = math.fsum(offer.expected_rollouts_per_s * count for offer, count in picks)
        cost = math.fsum(effective_usd_per_h(offer, rules.terms) * count for offer, count in picks)
        if picks and brought >= missing * (1 - SLACK) and cost <= (1 - rules.saving) * machine.usd_per_h:
            reason = (
                f"{machine.machine_id} costs {machine.usd_per_h:.4g} USD/h, and {missing:.3g} trajectories/s that replace "
                f"it cost {cost:.4g} USD/h; it is released once they deliver"
            )
            return Replacement(machine.machine_id, picks, reason)
    return None


def _enough(machines: dict[str, Machine], need: Requirement) -> bool:
    rest = pooled(machine.rate for machine in machines.values())
    target = need.mu_target_per_s * (1 - SLACK)
    return rest.mean_per_s >= target * (1 + BAND) and rest.lower_per_s(_SURE_DEVIATIONS) >= target


def _by_cost(view: View, rules: Rules) -> list[Machine]:
    """Machines that could be released, the dearest first (drawn at random without cost awareness)."""
    now_s = view.seen.now_s
    ours = [m for m in view.active.values() if m.offer and m.usd_per_h > 0 and m.paid_until_s <= now_s]
    ours.sort(key=lambda machine: (-unit_cost(machine), machine.machine_id))
    if rules.policy == "random":
        ours.sort(key=lambda machine: machine.machine_id)
        Random(rules.seed).shuffle(ours)
    return ours
