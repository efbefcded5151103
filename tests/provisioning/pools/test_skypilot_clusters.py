from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.errors import Refused
from echo2.provisioning.observation import Phase
from echo2.provisioning.pools.pool import Handle
from echo2.provisioning.pools.skypilot_clusters import (
    Known,
    Sighting,
    check_machine_id,
    cluster_name,
    handles,
    labels,
    machine_of,
    prefix,
)

RUN = "run-1"
KNOWN = Known("gcp-a2", 3.6)
NAME = cluster_name(RUN, "gcp-a2-1")


def seen(status: str = "UP", **fields: object) -> Sighting:
    return Sighting(name=NAME, status=status, labels=labels("gcp-a2-1", KNOWN), **fields)  # type: ignore[arg-type]


def told(*sightings: Sighting, known: dict[str, Known] | None = None, **state: object) -> tuple[Handle, ...]:
    rest = {"launching": (), "leaving": (), "prices": {}, **state}
    return handles(RUN, sightings, {"gcp-a2-1": KNOWN} if known is None else known, **rest)  # type: ignore[arg-type]


def phase(*sightings: Sighting, **state: object) -> Phase:
    (handle,) = told(*sightings, **state)  # type: ignore[arg-type]
    return handle.phase


@given(st.text(), st.text())
def test_a_name_is_legal_for_every_cloud_and_short_enough_not_to_be_cut(run_id: str, machine_id: str) -> None:
    name = cluster_name(run_id, machine_id)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) == 19
    assert name.startswith(prefix(run_id))
    assert cluster_name(run_id, name) == name


def test_machines_of_a_run_and_runs_of_a_machine_have_clusters_of_their_own() -> None:
    names = {cluster_name(f"run-{run}", f"gcp-a2-{machine}") for run in range(30) for machine in range(300)}
    assert len(names) == 9000


@given(st.from_regex(r"[a-z0-9]+(-[a-z0-9]+)*", fullmatch=True), st.integers(0, 10**9))
def test_labels_bring_back_machine_offer_and_price(machine_id: str, micro_usd: int) -> None:
    known = Known("gcp-a2", micro_usd / 1e6)
    sighting = Sighting(name=cluster_name(RUN, machine_id), status="UP", labels=labels(machine_id, known))
    assert machine_of(RUN, sighting) == (machine_id, known)


@pytest.mark.parametrize("found", [{}, {"echo2-machine": "another-1"}, {"echo2-microusd-per-h": "³"}])
def test_a_cluster_without_readable_labels_goes_by_its_own_name_and_is_lost(found: dict[str, str]) -> None:
    sighting = Sighting(name=NAME, status="UP", labels=found)
    (handle,) = told(sighting, known={})
    assert (handle.machine_id, handle.phase) == (NAME, Phase.LOST)


def test_a_cluster_that_is_being_launched_is_passed_over_until_it_has_labels() -> None:
    assert told(Sighting(name=NAME, status="INIT"), known={}, launching={NAME}) == ()
    (handle,) = told(Sighting(name=NAME, status="INIT"), launching={NAME})
    assert (handle.machine_id, handle.phase) == ("gcp-a2-1", Phase.ACTIVE)


@pytest.mark.parametrize(
    ("sighting", "expected"),
    [
        (seen("UP", was_up=True), Phase.ACTIVE),
        (seen("INIT"), Phase.ACTIVE),
        (seen("PENDING"), Phase.ACTIVE),
        (seen("INIT", unhealthy=True), Phase.FAILED),
        (seen("INIT", unhealthy=True, was_up=True), Phase.LOST),
        (seen("INIT", was_up=True), Phase.LOST),
        (seen("STOPPED", was_up=True), Phase.LOST),
        (seen("AUTOSTOPPING", was_up=True), Phase.DRAINING),
    ],
)
def test_what_skypilot_calls_a_cluster_decides_the_phase(sighting: Sighting, expected: Phase) -> None:
    assert phase(sighting) is expected
    assert phase(sighting, known={}) is expected
    assert phase(sighting, leaving={NAME}) is Phase.DRAINING
    failed = {"gcp-a2-1": Known("gcp-a2", 3.6, "no capacity")}
    assert phase(sighting, known=failed) is (Phase.ACTIVE if sighting.status == "UP" else Phase.FAILED)


def test_a_machine_that_was_ordered_and_has_no_cluster_is_lost_once_its_launch_is_over() -> None:
    assert phase(launching={NAME}) is Phase.ACTIVE
    assert phase() is Phase.LOST


def test_a_failed_launch_says_why() -> None:
    (handle,) = told(seen("INIT"), known={"gcp-a2-1": Known("gcp-a2", 3.6, "no capacity")})
    assert (handle.phase, handle.detail) == (Phase.FAILED, "no capacity")


def test_the_price_is_that_of_the_zone_or_of_the_offer_now_or_else_that_of_the_order() -> None:
    assert told(seen())[0].usd_per_h == 3.6
    assert told(seen(), prices={"gcp-a2": 2.5})[0].usd_per_h == 2.5
    assert told(seen(usd_per_h=2.7), prices={"gcp-a2": 2.5})[0].usd_per_h == 2.7


@pytest.mark.parametrize("machine_id", ["", "A-1", "a.1", "a_1", "-a", "a-", "a--1", "a b", "a" * 64, "é"])
def test_ids_that_some_cloud_would_not_take_are_refused(machine_id: str) -> None:
    with pytest.raises(Refused, match="at most 63 lower-case letters"):
        check_machine_id(machine_id)
