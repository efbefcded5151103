"""Which offers machines may be ordered from now, and which ones to order.

Invariant: an offer whose price is unknown, that is waiting after a failure or that is used up is never ordered from;
what is left is chosen by ``provisioning.selection``, whose answer does not depend on any order.

What an offer's machines delivered corrects what the offer says: its list counts as one machine that delivers as
stated. So a seller that promises ten times too much is believed half after its first machine, and less after each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from echo2.errors import UserError
from echo2.provisioning import selection
from echo2.provisioning.observation import Machine, Observation, Phase
from echo2.provisioning.offers import Offer, effective_usd_per_h
from echo2.provisioning.rates import Estimate
from echo2.provisioning.roster import Roster
from echo2.provisioning.rules import Rules
from echo2.provisioning.tariff import Known, Tariff

_TELLING_DELIVERIES = 8.0
"""An estimate of so many deliveries' weight (a third of uncertainty) tells of its offer."""
_TELLING_DEVIATIONS = 2.0
"""…as does one that is surely below what the offer says, however few they were."""
_REMEMBERED = 64
"""Machines of an offer that are remembered, the newest."""
_PROOF_S = 2.0
_LEAST_PER_S = 1e-9

Learned = Mapping[str, dict[str, float]]
"""By offer and machine: trajectories per second of those that were measured."""


class Open(msgspec.Struct, frozen=True):
    """What may be ordered now."""

    offers: tuple[Offer, ...]
    """In order of names; counts are what is left, prices those of now, rates those expected."""
    proven: tuple[Offer, ...]
    """The same, but where machines were measured nothing else counts: what a replacement is planned with."""
    prices: dict[str, Known]
    closed: tuple[str, ...]
    """For people: offers that may not be ordered from, and why."""


def learned_of(before: Learned, seen: Observation) -> Learned:
    """What the active machines of each offer deliver; what was learned of machines that are gone stays."""
    stated = {listing.offer.name: listing.offer.rollouts_per_s for listing in seen.listings}
    learned = dict(before)
    for machine in seen.machines:
        heard = machine.phase is Phase.ACTIVE and machine.available and machine.offer
        if heard and _tells(machine.rate, stated.get(machine.offer)):
            rates = {**learned.get(machine.offer, {}), machine.machine_id: machine.rate.mean_per_s}
            learned[machine.offer] = dict(list(rates.items())[-_REMEMBERED:])
    return learned


def expected_of(seen: Observation, learned: Learned) -> dict[str, float]:
    """By offer, trajectories per second of a machine, less the time in which it is down."""
    offers = (listing.offer for listing in seen.listings)
    return {offer.name: offer.reliability * _expected(offer, learned) for offer in offers}


def open_offers(seen: Observation, roster: Roster, tariff: Tariff, learned: Learned, rules: Rules) -> Open:
    used = _in_use(seen.machines, roster)
    offers, proven, prices, closed = [], [], {}, []
    for listing in sorted(seen.listings, key=lambda listing: listing.offer.name):
        offer = listing.offer
        price = tariff.price(offer.name, seen.now_s, rules.max_price_age_s)
        retry_s, left = roster.retry_s(offer.name), offer.count - used[offer.name]
        if price is None:
            closed.append(f"{offer.name}: its price is unknown or older than {rules.max_price_age_s:g} s")
        elif retry_s is not None and seen.now_s < retry_s:
            closed.append(f"{offer.name}: its last machine did not start, tried again in {retry_s - seen.now_s:.0f} s")
        elif left < 1:
            closed.append(f"{offer.name}: all {offer.count} are in use")
        else:
            now = msgspec.structs.replace(offer, count=left, usd_per_h=price.usd_per_h)
            offers.append(msgspec.structs.replace(now, rollouts_per_s=_expected(offer, learned)))
            proven.append(msgspec.structs.replace(now, rollouts_per_s=_measured(offer, learned)))
            prices[offer.name] = price
    return Open(tuple(offers), tuple(proven), prices, tuple(closed))


def choose(offers: Sequence[Offer], missing_per_s: float, rules: Rules, draw: int) -> list[tuple[Offer, int]]:
    """Machines that deliver ``missing_per_s`` together, or all there are; rising rho. ``draw`` varies ``random``."""
    if not offers:
        return []
    reach = math.fsum(offer.count * offer.expected_rollouts_per_s for offer in offers)
    if reach <= missing_per_s:
        return [(offer, offer.count) for offer in selection.ranked(offers, rules.terms)]
    if rules.policy == "random":
        picked = selection.random(offers, missing_per_s, rules.terms, seed=rules.seed + draw)
    elif rules.policy == "exact":
        picked = _exact(offers, missing_per_s, rules)
    else:
        picked = selection.cheapest(offers, missing_per_s, rules.terms)
    return [(pick.offer, pick.machines) for pick in picked.picks]


def _exact(offers: Sequence[Offer], missing_per_s: float, rules: Rules) -> selection.Selection:
    """The optimum; where its proof takes too long for a decision that is due, what ``cheapest`` found."""
    try:
        return selection.exact(offers, missing_per_s, rules.terms, limit_s=_PROOF_S)
    except UserError:
        return selection.cheapest(offers, missing_per_s, rules.terms)


def least_dear(offers: Iterable[Offer], machines: int, rules: Rules) -> list[tuple[Offer, int]]:
    """So many machines of the least cost per hour, whatever they deliver."""
    picked = []
    for offer in sorted(offers, key=lambda offer: (effective_usd_per_h(offer, rules.terms), offer.name)):
        if machines > 0:
            picked.append((offer, min(machines, offer.count)))
            machines -= picked[-1][1]
    return picked


def _in_use(machines: Iterable[Machine], roster: Roster) -> Counter[str]:
    offer_of = {name: start.offer for name, start in roster.starts.items()}
    gone = (Phase.LOST, Phase.FAILED)
    offer_of |= {machine.machine_id: machine.offer for machine in machines if machine.phase not in gone}
    return Counter(offer_of.values())


def _expected(offer: Offer, learned: Learned) -> float:
    rates = [rate for _, rate in sorted(learned.get(offer.name, {}).items())]
    return max(_LEAST_PER_S, math.fsum((offer.rollouts_per_s, *rates)) / (1 + len(rates)))


def _measured(offer: Offer, learned: Learned) -> float:
    rates = [rate for _, rate in sorted(learned.get(offer.name, {}).items())]
    return max(_LEAST_PER_S, math.fsum(rates) / len(rates)) if rates else offer.rollouts_per_s


def _tells(rate: Estimate, stated_per_s: float | None) -> bool:
    if rate.mean_per_s <= 0:
        return False
    if rate.deliveries >= _TELLING_DELIVERIES:
        return True
    return stated_per_s is not None and rate.upper_per_s(_TELLING_DEVIATIONS) < stated_per_s
