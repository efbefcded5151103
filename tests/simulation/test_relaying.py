"""Dissemination in the simulated world: the production plan as fluid streams, beside the relays' own machines."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
import pytest

from echo2.config.load import build_config
from echo2.simulation.links import LinkModel
from echo2.simulation.models import LearnerModel, WorkerModel, WorldModel
from echo2.simulation.world import COORDINATOR, Scenario, SimulatedRun, World, simulate

LINE_BYTES_PER_S = 6.25e6
DELTA_BYTES = 40e6
MODEL = WorldModel(
    learner=LearnerModel(train_s=40.0, snapshot_bytes=50e6), uplink_bytes_per_s=50e6, delta_bytes=DELTA_BYTES
)


def run(
    relays: Literal["none", "planned", "nodes"], workers: int, topology: str = "chain", *, uplink: float = 50e6,
    steps: int = 7, pieces: int = 32, scenario: Scenario | None = None, link: LinkModel | None = None,
) -> SimulatedRun:  # fmt: skip
    tables: dict[str, Any] = {
        "run": {"steps": steps},
        "rollout": {"engine": "scripted", "rollouts_per_step": 4 * workers, "group_size": 4},
        "coordinator": {"dead_after_s": 30.0},
        "broadcast": {"topology": topology},
    }
    line = link or LinkModel(bytes_per_s=LINE_BYTES_PER_S)
    fleet = [WorkerModel(f"w{number:02}", line, group_s=8.0, activation_s=0.01) for number in range(workers)]
    model = msgspec.structs.replace(MODEL, relays=relays, uplink_bytes_per_s=uplink, pieces=pieces)
    return simulate(build_config(tables, check_places=False), fleet, seed=1, model=model, scenario=scenario)


def way_s(made: SimulatedRun) -> float:
    """From the last publish but one that spread until enough workers ran it."""
    published = {e["policy"]: e["at_s"] for e in made.events if e["kind"] == "published" and e["who"] == COORDINATOR}
    spread = [event for event in made.events if event["kind"] == "disseminated"]
    return float(spread[-1]["at_s"] - published[spread[-1]["policy"]])


@pytest.mark.parametrize(
    ("topology", "workers", "uplink", "tolerance"),
    [("chain", 8, 50e6, 0.03), ("chain", 16, 50e6, 0.03), ("star", 8, 25e6, 0.03), ("ring", 8, 50e6, 0.04)],
)
def test_the_plan_as_fluid_streams_takes_as_long_as_the_relays_own_machines(
    topology: str, workers: int, uplink: float, tolerance: float
) -> None:
    """Once those have measured their lines."""
    planned = way_s(run("planned", workers, topology, uplink=uplink))
    assert planned == pytest.approx(way_s(run("nodes", workers, topology, uplink=uplink)), rel=tolerance)


def test_a_chain_takes_the_time_of_one_line_however_many_workers_and_a_star_does_not() -> None:
    one_line_s = DELTA_BYTES / LINE_BYTES_PER_S
    for workers in (8, 24):
        assert way_s(run("planned", workers)) < 1.25 * one_line_s
    assert way_s(run("planned", 24, "star")) > 2.9 * one_line_s * 8 / 10
    assert way_s(run("none", 24)) > 2.9 * one_line_s * 8 / 10


@pytest.mark.parametrize("pieces", [4, 8])
def test_coarser_pieces_change_the_time_by_a_few_per_cent(pieces: int) -> None:
    fine, coarse = way_s(run("planned", 16)), way_s(run("planned", 16, pieces=pieces))
    assert coarse == pytest.approx(fine, rel=0.05)


def test_uploads_slower_than_downloads_get_the_rest_from_the_learner() -> None:
    slow_up = LinkModel(bytes_per_s=LINE_BYTES_PER_S, up_bytes_per_s=2e6)
    mixed = way_s(run("planned", 12, link=slow_up))
    assert DELTA_BYTES / LINE_BYTES_PER_S < mixed < 0.6 * DELTA_BYTES / 2e6


@pytest.mark.parametrize("relays", ["planned", "nodes"])
def test_children_of_a_relay_that_dies_are_fed_by_others(relays: Literal["planned", "nodes"]) -> None:
    async def kill_in_mid_transfer(world: World) -> None:
        while len(world.events.kinds("published", COORDINATOR)) < 3:
            await asyncio.sleep(0.5)
        await asyncio.sleep(2.5)
        await world.kill("w00")
        await asyncio.sleep(5.0)
        world.start("w00")

    made = run(relays, 8, steps=5, uplink=12.5e6, scenario=kill_in_mid_transfer)
    newest = [event for event in made.events if event["kind"] == "installed" and event["policy"] == "0.4"]
    assert {event["who"] for event in newest} >= {f"w{number:02}" for number in range(1, 8)}
    assert made.metrics[-1].step == 4
    assert made.metrics[-1].reparentings > 0


@pytest.mark.parametrize("relays", ["planned", "nodes"])
def test_the_seed_sends_few_copies(relays: Literal["planned", "nodes"]) -> None:
    made = run(relays, 10, steps=5)
    publishes = sum(event["kind"] == "published" and event["who"] == COORDINATOR for event in made.events) - 1
    whole = MODEL.learner.snapshot_bytes
    assert made.metrics[-1].seed_sent_bytes < 10 * (publishes * DELTA_BYTES + whole)
    assert sum(made.metrics[-1].sent_bytes_by_node.values()) > DELTA_BYTES
