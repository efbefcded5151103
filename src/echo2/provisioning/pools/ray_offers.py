"""What machines take of a Ray cluster, and how many of them it has room for.

Invariant: the machines that ``most`` allows fit the cluster all at once, node by node and beside what others run on it,
whichever of them are ordered. Where offers compete for the same resources, those of the least cost per throughput come
first, as they would be ordered first.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from echo2.errors import UserError
from echo2.provisioning.offers import Offer

_ROUNDING = 1e-4
"""Ray counts resources in ten-thousandths."""
_ACCELERATOR_SHARE = 0.001
"""What Ray takes of ``accelerator_type:X``, of which every node with such accelerators has 1."""
_OWN_NAMES = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class Needs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one machine takes. Raises UserError for amounts that Ray would not give."""

    cpus: float = 1.0
    gpus: float = 0.0
    """A part of one GPU, or whole ones."""
    accelerator_type: str = ""
    """As Ray names it, for example ``A100``; empty where any will do."""
    custom: Mapping[str, float] = {}
    """Other resources by the names that the cluster's nodes were started with."""

    def __post_init__(self) -> None:
        for name, amount in {"cpus": self.cpus, "gpus": self.gpus, **self.custom}.items():
            if not (amount >= 0 and math.isfinite(amount)):
                raise UserError(f"a machine of the ray pool must need at least 0 of {name}, got {amount:g}")
        if self.gpus > 1 and not self.gpus.is_integer():
            raise UserError(f"gpus must be at most 1 or a whole number, got {self.gpus:g}")
        if taken := _OWN_NAMES & set(self.custom):
            raise UserError(f"custom resources must not be {' or '.join(sorted(taken))}, which are Ray's own")
        if not any(amount >= _ROUNDING for amount in self.amounts().values()):
            raise UserError(
                "a machine of the ray pool must need some of a resource, or nothing would limit their number"
            )

    def amounts(self) -> dict[str, float]:
        """By Ray's names; what is not needed is left out."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.custom}
        if self.accelerator_type:
            amounts[f"accelerator_type:{self.accelerator_type}"] = _ACCELERATOR_SHARE
        return {name: amount for name, amount in amounts.items() if amount > 0}


class RayOffer(msgspec.Struct, frozen=True):
    """Machines of one kind on the cluster: price, count and throughput as for any offer, and what one of them takes.

    Raises UserError for a name that could not be part of a worker's name.
    """

    offer: Offer
    needs: Needs

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.offer.name):
            raise UserError(
                "names of the ray pool's offers must be letters, digits, dots, dashes and underscores, "
                f"got {self.offer.name[:40]!r}"
            )


class Node(msgspec.Struct, frozen=True):
    """A node that is alive."""

    node_id: str
    total: Mapping[str, float]
    """All its resources by Ray's names, used or not."""


class Placed(msgspec.Struct, frozen=True):
    """A machine of ours that the cluster has, or has been asked for."""

    offer: str
    node_id: str = ""
    """Empty while Ray has not placed it."""


def most(
    offers: Sequence[RayOffer], nodes: Iterable[Node], available: Mapping[str, float], ours: Iterable[Placed]
) -> dict[str, int]:
    """By offer, how many of its machines the run may have at one time, those of ``ours`` among them.

    ``available``: what nobody uses of each resource, over all nodes.
    """
    needs = {each.offer.name: each.needs.amounts() for each in offers}
    free = {node.node_id: dict(node.total) for node in nodes}
    left = dict(available)
    have: Counter[str] = Counter()
    waiting = []
    for machine in ours:
        have[machine.offer] += 1
        if machine.node_id in free:
            _take(needs.get(machine.offer, {}), free[machine.node_id], 1)
        elif machine.offer in needs:
            waiting.append(needs[machine.offer])
    for amounts in waiting:
        _fill(amounts, 1, free, left)
    found = {}
    for each in sorted(offers, key=_worth):
        name = each.offer.name
        wanted = max(0, each.offer.count - have[name])
        found[name] = min(each.offer.count, have[name] + _fill(needs[name], wanted, free, left))
    return found


def _worth(each: RayOffer) -> tuple[float, str]:
    return each.offer.usd_per_h / each.offer.expected_rollouts_per_s, each.offer.name


def _fill(amounts: Mapping[str, float], wanted: int, free: dict[str, dict[str, float]], left: dict[str, float]) -> int:
    """Place up to ``wanted`` machines; say how many there was room for."""
    placed = 0
    for _, node in sorted(free.items()):
        fits = min(wanted - placed, _fits(amounts, node), _fits(amounts, left))
        _take(amounts, node, fits)
        _take(amounts, left, fits)
        placed += fits
    return placed


def _fits(amounts: Mapping[str, float], free: Mapping[str, float]) -> int:
    return max(0, min(math.floor((free.get(name, 0.0) + _ROUNDING / 2) / amount) for name, amount in amounts.items()))


def _take(amounts: Mapping[str, float], free: dict[str, float], times: int) -> None:
    for name, amount in amounts.items():
        free[name] = free.get(name, 0.0) - times * amount
