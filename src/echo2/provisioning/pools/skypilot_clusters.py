"""One machine, one SkyPilot cluster: how the two are named after each other, and what a cluster's state means.

Invariant: a cluster's name follows from the run and the machine alone, so that a start repeated after a crash finds the
cluster of the first one, and a stop needs no memory. What a name is too short for is in the cluster's labels, which
SkyPilot keeps in its own records, whether or not the cloud has labels.

A name has 19 characters. SkyPilot cuts a name that is too long for a cloud and appends two characters of a hash, which
two of a run's machines would soon share. The shortest limit of its clouds is 28 with the user's hash (9) in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from echo2.errors import Refused
from echo2.provisioning.observation import Phase
from echo2.provisioning.pools.pool import Handle

MACHINE_LABEL = "echo2-machine"
OFFER_LABEL = "echo2-offer"
PRICE_LABEL = "echo2-microusd-per-h"
"""A whole number: labels of Google Cloud hold no dots."""
UP = "UP"
_MICRO = 1e6
_RUN_CHARACTERS = 6
_MACHINE_CHARACTERS = 10
_MACHINE_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""What is legal as a label of every cloud, as a task's and as a worker's name, up to 63 characters."""
_MOST_CHARACTERS = 63


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """What SkyPilot says of one cluster."""

    name: str
    status: str
    """INIT, UP, STOPPED, AUTOSTOPPING or PENDING."""
    unhealthy: bool = False
    """INIT, and not because it is being launched: nodes or SkyPilot's own programs on them are gone."""
    was_up: bool = False
    """A launch of it succeeded at some time."""
    detail: str = ""
    labels: Mapping[str, str] = {}
    usd_per_h: float | None = None
    """Where it runs, now; None where that is not known."""


class Known(msgspec.Struct, frozen=True):
    """What was ordered under a machine's id."""

    offer: str = ""
    usd_per_h: float = 0.0
    failure: str = ""
    """Why its launch failed."""


def prefix(run_id: str) -> str:
    """Of the names of all clusters of a run."""
    return f"e2{_digest(run_id, _RUN_CHARACTERS)}-"


def cluster_name(run_id: str, machine_id: str) -> str:
    """Lower-case letters, digits and a dash, a letter first. The name of a cluster of the run stands for itself."""
    start = prefix(run_id)
    if machine_id.startswith(start) and len(machine_id) == len(start) + _MACHINE_CHARACTERS:
        return machine_id
    return start + _digest(machine_id, _MACHINE_CHARACTERS)


def check_machine_id(machine_id: str) -> None:
    """Raises Refused for one that some cloud would not take as a label."""
    if len(machine_id) > _MOST_CHARACTERS or not _MACHINE_ID.fullmatch(machine_id):
        raise Refused(
            f"a machine's id must be at most {_MOST_CHARACTERS} lower-case letters, digits and single dashes, "
            f"got {machine_id!r}"
        )


def labels(machine_id: str, known: Known) -> dict[str, str]:
    return {
        MACHINE_LABEL: machine_id,
        OFFER_LABEL: known.offer,
        PRICE_LABEL: str(round(known.usd_per_h * _MICRO)),
    }


def machine_of(run_id: str, sighting: Sighting) -> tuple[str, Known]:
    """Whose cluster it is. One without labels we can read goes by its own name, under which it can be stopped."""
    machine_id = sighting.labels.get(MACHINE_LABEL, "")
    price = sighting.labels.get(PRICE_LABEL, "")
    usd_per_h = int(price) / _MICRO if price.isascii() and price.isdigit() else 0.0
    known = Known(sighting.labels.get(OFFER_LABEL, ""), usd_per_h)
    if cluster_name(run_id, machine_id) != sighting.name:
        return sighting.name, known
    return machine_id, known


def adopted(
    run_id: str, sightings: Iterable[Sighting], known: Iterable[str], launching: Collection[str]
) -> dict[str, Known]:
    """Clusters of the run that were ordered by an earlier life of the coordinator, by machine.

    One that is being launched has no labels yet, and is passed over until it has.
    """
    ours = {cluster_name(run_id, machine_id) for machine_id in known}
    others = [machine_of(run_id, sighting) for sighting in sightings if sighting.name not in ours]
    return {machine_id: what for machine_id, what in others if machine_id not in launching}


def handles(
    run_id: str,
    sightings: Collection[Sighting],
    known: Mapping[str, Known],
    *,
    launching: Collection[str],
    leaving: Collection[str],
    prices: Mapping[str, float],
) -> tuple[Handle, ...]:
    """All machines of the run, by id.

    ``known``: those ordered and not stopped, by id. ``launching`` and ``leaving``: names of clusters for which a launch
    or an end is under way. ``prices``: USD per hour of offers, where they are known now.
    """
    seen = {sighting.name: sighting for sighting in sightings}
    machines = {**adopted(run_id, sightings, known, launching), **known}
    found = []
    for machine_id, what in sorted(machines.items()):
        name = cluster_name(run_id, machine_id)
        cluster = seen.get(name)
        phase, detail = _phase(cluster, what, launching=name in launching, leaving=name in leaving)
        usd_per_h = cluster.usd_per_h if cluster is not None else None
        if usd_per_h is None:
            usd_per_h = prices.get(what.offer, what.usd_per_h)
        found.append(Handle(machine_id=machine_id, offer=what.offer, phase=phase, usd_per_h=usd_per_h, detail=detail))
    return tuple(found)


def _phase(seen: Sighting | None, known: Known, *, launching: bool, leaving: bool) -> tuple[Phase, str]:
    up = seen is not None and seen.status == UP
    if known.failure and not up:
        return Phase.FAILED, known.failure
    if leaving:
        return Phase.DRAINING, "it is being taken down"
    if launching:
        return Phase.ACTIVE, seen.detail if seen is not None else "waiting to be launched"
    if seen is None:
        return Phase.LOST, "SkyPilot has no such cluster any more: it went down by itself or was taken away"
    if not known.offer:
        return Phase.LOST, "a cluster of this run with unknown labels"
    if up:
        return Phase.ACTIVE, seen.detail
    if seen.status == "PENDING" or (seen.status == "INIT" and not seen.was_up and not seen.unhealthy):
        # A launch that an earlier life of the coordinator began and SkyPilot still queues, or gave up: the deadline
        # of the start tells the two apart.
        return Phase.ACTIVE, seen.detail
    if seen.status == "AUTOSTOPPING":
        return Phase.DRAINING, "its worker ended, and it takes itself down"
    if seen.status == "INIT" and not seen.was_up:
        return Phase.FAILED, seen.detail or "it never came up"
    return Phase.LOST, seen.detail or f"SkyPilot calls it {seen.status}"


def _digest(text: str, characters: int) -> str:
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()[:characters]
