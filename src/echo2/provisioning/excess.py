"""Which machines a pool can do without, and which ones others could replace at much less.

Invariant: whatever is released, what stays active delivers more than the target by the band and, three deviations
below its mean, still the target; a machine that delivers next to nothing, beside the target and beside the others, goes
if the target is met without it. Nothing counts for what stays that is only on its way or was not measured yet. Nothing
is released within its minimum rental (it would be paid for all the same), and nothing that costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random

import msgspec

from echo2.provisioning.market import choose
from echo2.provisioning.observation import Machine
from echo2.provisioning.offers import Offer, effective_usd_per_h
from echo2.provisioning.rates import Estimate, pooled
from echo2.provisioning.rules import Requirement, Rules
from echo2.provisioning.view import SLACK, View

BAND = 0.05
"""What stays must exceed the target by this share: between it and the target nothing happens (I03)."""
_SURE_DEVIATIONS = 3.0
_MEASURED_DELIVERIES = 4.0
"""A machine counts for what stays once its estimate rests on so many deliveries, of which its offer's word is two."""
_OFFER_DELIVERIES = 8.0
"""Weight of what an offer's machines deliver beside what one of them did."""
_NEXT_TO_NOTHING = 0.25
"""Of what a machine of the pool delivers in the mean: in a large pool each is little beside the target."""
_ROUNDING = 1e-6
_LOOKED_AT = 8
"""Dearest machines for which a replacement is looked for."""


class Replacement(msgspec.Struct, frozen=True):
    machine_ids: tuple[str, ...]
    """The dear ones."""
    picks: list[tuple[Offer, int]]
    reason: str


class _Room(msgspec.Struct, frozen=True):
    """Of machines that stay, trajectories per second."""

    spare_per_s: float
    """A machine that counts and delivers more cannot be spared; rounded up."""
    little_per_s: float
    """What surely delivers less makes no difference."""


def unit_cost(machine: Machine, view: View) -> float:
    """rho: USD per hour for a trajectory per second; infinite for a machine that delivers nothing.

    What is not known of the machine itself is taken from its offer: an estimate counts as far as it is sure, so that
    luck does not make one of a kind look dearer than the others.
    """
    rate = machine.rate
    own = 1 / (1 + _OFFER_DELIVERIES / rate.deliveries) if rate.deliveries > 0 else 0.0
    mean_per_s = own * rate.mean_per_s + (1 - own) * view.expected_per_s.get(machine.offer, rate.mean_per_s)
    return machine.usd_per_h / mean_per_s if mean_per_s > 0 else math.inf


def releasable(view: View, need: Requirement, rules: Rules, only: Collection[str] = ()) -> list[str]:
    """Machines that can go together: the dearest first, each if what then stays is enough.

    only: where it is not empty, nobody else is looked at.
    """
    if view.pool.mean_per_s < need.mu_target_per_s:
        return []
    staying, found = dict(view.active), []
    room = _room(staying, need)
    for machine in _by_cost(view, rules):
        if only and machine.machine_id not in only:
            continue
        is_little = machine.rate.upper_per_s(_SURE_DEVIATIONS) <= room.little_per_s
        if _counts(machine) and machine.rate.mean_per_s > room.spare_per_s and not is_little:
            continue  # The sums below would say the same, at the square of the pool's size in time.
        rest = {name: other for name, other in staying.items() if name != machine.machine_id}
        if _enough(rest, need) or (is_little and _meets(rest, need)):
            staying, room = rest, _room(rest, need)
            found.append(machine.machine_id)
    return found


def replacement(view: View, need: Requirement, rules: Rules) -> Replacement | None:
    """Machines that would deliver what the dearest ones do, for at least ``Rules.saving`` less per hour and per
    trajectory; for as few of them as that is so. None where it is not, and by ``random`` (NoCost).
    """
    if rules.policy == "random" or not view.open.proven:
        return None
    dear = _by_cost(view, rules)[:_LOOKED_AT]
    least_rho = min(effective_usd_per_h(o, rules.terms) / o.expected_rollouts_per_s for o in view.open.proven)
    for count in range(1, len(dear) + 1):
        paid = math.fsum(machine.usd_per_h for machine in dear[:count])
        missing = _missing_without(dear[:count], view, need)
        if missing <= 0 or missing * least_rho > (1 - rules.saving) * paid:
            continue  # No choice could cost so little.
        picks = choose(view.open.proven, missing, rules, 0)
        brought = math.fsum(offer.expected_rollouts_per_s * machines for offer, machines in picks)
        cost = math.fsum(effective_usd_per_h(offer, rules.terms) * machines for offer, machines in picks)
        enough = brought >= missing * (1 - SLACK) and cost <= (1 - rules.saving) * paid
        if enough and _dearer(dear[count - 1], cost / brought, rules):
            names = tuple(machine.machine_id for machine in dear[:count])
            reason = (
                f"{', '.join(names)} cost {paid:.4g} USD/h, and {missing:.3g} trajectories/s in their place cost "
                f"{cost:.4g} USD/h; they are released once those deliver"
            )
            return Replacement(names, picks, reason)
    return None


def _missing_without(dear: Sequence[Machine], view: View, need: Requirement) -> float:
    """Trajectories per second that make the others enough to let ``dear`` go."""
    gone = {machine.machine_id for machine in dear}
    rest = _measured(other for name, other in view.active.items() if name not in gone)
    unsure = _SURE_DEVIATIONS * math.sqrt(rest.variance)
    return need.mu_target_per_s + max(need.mu_target_per_s * BAND, unsure) - rest.mean_per_s


def _dearer(machine: Machine, rho: float, rules: Rules) -> bool:
    """Whether its trajectories cost much more than ``rho`` (USD/h per trajectory/s), even if it had bad luck so far."""
    return rho * machine.rate.upper_per_s() <= (1 - rules.saving) * machine.usd_per_h


def _enough(machines: Mapping[str, Machine], need: Requirement) -> bool:
    rest = _measured(machines.values())
    target = need.mu_target_per_s * (1 - SLACK)
    return rest.mean_per_s >= target * (1 + BAND) and rest.lower_per_s(_SURE_DEVIATIONS) >= target


def _room(machines: Mapping[str, Machine], need: Requirement) -> _Room:
    counted = [machine.rate.mean_per_s for machine in machines.values() if _counts(machine)]
    spare_per_s = math.fsum(counted) - need.mu_target_per_s * (1 + BAND - _ROUNDING)
    usual_per_s = math.fsum(counted) / max(1, len(counted))
    return _Room(spare_per_s, min(BAND / 2 * need.mu_target_per_s, usual_per_s * _NEXT_TO_NOTHING))


def _meets(machines: Mapping[str, Machine], need: Requirement) -> bool:
    return _measured(machines.values()).mean_per_s >= need.mu_target_per_s * (1 - SLACK)


def _measured(machines: Iterable[Machine]) -> Estimate:
    """Of those that have shown what they deliver: what a seller promises for several machines is one promise."""
    return pooled(machine.rate for machine in machines if _counts(machine))


def _counts(machine: Machine) -> bool:
    return machine.rate.deliveries >= _MEASURED_DELIVERIES


def _by_cost(view: View, rules: Rules) -> list[Machine]:
    """Machines that could be released, the dearest first (drawn at random without cost awareness)."""
    now_s = view.seen.now_s
    ours = [m for m in view.active.values() if m.offer and m.usd_per_h > 0 and m.paid_until_s <= now_s]
    ours = [machine for machine in ours if not _young(machine, view)]
    ours.sort(key=lambda m: (-unit_cost(m, view), m.machine_id))
    if rules.policy == "random":
        ours.sort(key=lambda machine: machine.machine_id)
        Random(rules.seed).shuffle(ours)
    return ours


def _young(machine: Machine, view: View) -> bool:
    """It has not had the time to show what it delivers."""
    expected_per_s = view.expected_per_s.get(machine.offer, 0.0)
    return machine.rate.deliveries < _MEASURED_DELIVERIES and machine.rate.mean_per_s >= expected_per_s / 2
