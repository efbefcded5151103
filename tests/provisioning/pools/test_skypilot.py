"""The pool against a scripted API server: with a stand-in for the package, and with SkyPilot's own types where it is
installed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from scripted_sky import ScriptedSky, real_server, stand_in, write_catalogs

from echo2.errors import Refused, TransportError, UserError
from echo2.provisioning.estimate import Workload
from echo2.provisioning.observation import Phase
from echo2.provisioning.pools.pool import Pool
from echo2.provisioning.pools.skypilot import SkyPilotPool
from echo2.provisioning.pools.skypilot_clusters import cluster_name
from echo2.provisioning.pools.skypilot_market import Rentable
from echo2.provisioning.pools.skypilot_worker import WorkerPlan

RUN = "run-1"
OFFER = "gcp-a2-highgpu-1g-us-x1-spot"
ID = f"{OFFER}-1"
NAME = cluster_name(RUN, ID)
WANTED = (Rentable(cloud="gcp", gpu="A100", spot=True, count=4, rollouts_per_s=0.25),)
WRITTEN_S = 1_700_000_000.0


class StillClock:
    def __init__(self) -> None:
        self.now_s = 5000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return WRITTEN_S + self.now_s - 4400.0


@pytest.fixture(params=["stand-in", "skypilot"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ScriptedSky:
    return stand_in(monkeypatch) if request.param == "stand-in" else real_server(monkeypatch)


class Invitations:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, machine_id: str) -> str:
        self.asked.append(machine_id)
        return f"echo2://secret-of-{machine_id}@10.0.0.1:8400"


@pytest.fixture
def invite() -> Invitations:
    return Invitations()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_catalogs(tmp_path)
    for path in tmp_path.glob("*/vms.csv"):
        os.utime(path, (WRITTEN_S, WRITTEN_S))
    return tmp_path


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
async def pool(server: ScriptedSky, folder: Path, invite: Invitations, clock: StillClock) -> SkyPilotPool:
    return await another_life(folder, invite, clock)


async def another_life(folder: Path, invite: Invitations, clock: StillClock, **changes: Any) -> SkyPilotPool:
    plan = WorkerPlan(image="docker:example/echo2", install="pip install echo2", disk_gb=100)
    made = SkyPilotPool(RUN, changes.pop("wanted", WANTED), plan, invite, clock, catalog=folder, **changes)
    if not changes:
        await made.listings()
    return made


async def phases(pool: Pool) -> dict[str, Phase]:
    return {handle.machine_id: handle.phase for handle in await pool.machines()}


async def give_up_a_start(pool: SkyPilotPool, server: ScriptedSky) -> None:
    """While its launch is on its way to the server, where the gate holds it."""
    server.gate.clear()
    starting = asyncio.create_task(pool.start(ID, OFFER))
    while not server.knocked.is_set():
        await asyncio.sleep(0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


# ---- offers --------------------------------------------------------------------------------------------------------


async def test_offers_have_the_catalogs_prices_which_are_as_old_as_its_file(pool: SkyPilotPool) -> None:
    (listing,) = await pool.listings()
    assert listing.offer.name == OFFER
    (price,) = listing.prices
    assert price.usd_per_h == pytest.approx(1.2)
    assert price.at_s == 4400.0  # the file is 600 s old at 5000 s


async def test_an_old_catalog_is_fetched_anew_and_not_more_often_than_every_ten_minutes(
    pool: SkyPilotPool, server: ScriptedSky, folder: Path, clock: StillClock
) -> None:
    assert server.fetched == []
    clock.now_s += 4000.0
    for _ in range(3):
        (listing,) = await pool.listings()
        assert listing.prices[0].at_s == 4400.0
    assert server.fetched == [["gcp"]]

    def download() -> None:
        os.utime(folder / "gcp" / "vms.csv", (clock.wall(), clock.wall()))

    server.on_fetch = download
    clock.now_s += 700.0
    (listing,) = await pool.listings()
    assert listing.prices[0].at_s == clock.now_s
    assert len(server.fetched) == 2


async def test_a_server_that_cannot_fetch_a_catalog_leaves_the_old_prices(
    pool: SkyPilotPool, server: ScriptedSky, clock: StillClock
) -> None:
    clock.now_s += 4000.0
    server.errors["list_accelerators"] = ConnectionError("no route")
    (listing,) = await pool.listings()
    assert listing.prices[0].at_s == 4400.0


async def test_a_catalog_that_is_not_there_is_fetched_or_told_of(
    server: ScriptedSky, folder: Path, invite: Invitations, clock: StillClock
) -> None:
    wanted = (Rentable(cloud="aws", gpu="H100", rollouts_per_s=1.0),)
    pool = await another_life(folder, invite, clock, wanted=wanted, workload=None)
    with pytest.raises(Refused, match=r"SkyPilot's catalog of aws must lie in .*, and it does not"):
        await pool.listings()
    assert server.fetched == [["aws"]]


async def test_an_estimate_that_is_impossible_is_told_in_a_sentence(
    server: ScriptedSky, folder: Path, invite: Invitations, clock: StillClock
) -> None:
    workload = Workload(parameters=1e12, kv_bytes_per_token=1e5, prompt_tokens=1, reply_tokens=1000)
    wanted = (Rentable(cloud="vast", gpu="RTX5090"),)
    pool = await another_life(folder, invite, clock, wanted=wanted, workload=workload)
    with pytest.raises(Refused, match="must fit the machine"):
        await pool.listings()
    with pytest.raises(UserError, match="must have rollouts_per_s, or a workload"):
        await another_life(folder, invite, clock, wanted=wanted)


# ---- start ---------------------------------------------------------------------------------------------------------


async def test_a_start_launches_a_cluster_that_goes_down_by_itself(
    pool: SkyPilotPool, server: ScriptedSky, invite: Invitations
) -> None:
    handle = await pool.start(ID, OFFER)
    assert (handle.machine_id, handle.offer, handle.phase) == (ID, OFFER, Phase.ACTIVE)
    assert handle.usd_per_h == pytest.approx(1.2)
    (launched,) = server.launched
    assert launched.cluster == NAME
    assert launched.down and launched.idle_minutes_to_autostop == 5
    assert launched.wait_for.value == "jobs"
    assert launched.task.name == ID
    assert launched.task.run == f"set -e\npip install echo2\nexec echo2 worker --name {ID}"
    assert invite.asked == [ID]


async def test_starting_twice_launches_once(pool: SkyPilotPool, server: ScriptedSky, invite: Invitations) -> None:
    handles = await asyncio.gather(*(pool.start(ID, OFFER) for _ in range(3)))
    server.land(NAME)
    assert await pool.start(ID, OFFER) in handles
    assert len(server.launched) == 1
    assert invite.asked == [ID]


async def test_a_start_that_was_given_up_is_not_launched_again(pool: SkyPilotPool, server: ScriptedSky) -> None:
    await give_up_a_start(pool, server)
    server.gate.set()
    await pool.start(ID, OFFER)
    assert len(server.launched) == 1


async def test_what_the_server_refuses_is_refused_without_the_join_string(
    pool: SkyPilotPool, server: ScriptedSky
) -> None:
    server.errors["launch"] = ValueError(f"bad task: ECHO2_JOIN=echo2://secret-of-{ID}@10.0.0.1:8400")
    with pytest.raises(Refused, match=r"SkyPilot: bad task: ECHO2_JOIN=echo2://…@10.0.0.1:8400 \(ValueError\)") as told:
        await pool.start(ID, OFFER)
    assert told.value.__cause__ is None
    assert await phases(pool) == {}
    await pool.start(ID, OFFER)  # nothing is left of the first try


async def test_a_server_that_is_away_is_worth_another_try(pool: SkyPilotPool, server: ScriptedSky) -> None:
    server.errors["launch"] = ConnectionError("connection refused")
    with pytest.raises(TransportError, match="connection refused"):
        await pool.start(ID, OFFER)


async def test_only_what_is_listed_can_be_started_and_only_under_legal_ids(pool: SkyPilotPool) -> None:
    with pytest.raises(Refused, match="an offer must be one of those listed, got 'nothing'"):
        await pool.start("nothing-1", "nothing")
    with pytest.raises(Refused, match="a machine's id must be"):
        await pool.start("A/1", OFFER)


# ---- machines ------------------------------------------------------------------------------------------------------


async def test_a_machine_runs_from_its_order_until_it_is_stopped(pool: SkyPilotPool, server: ScriptedSky) -> None:
    await pool.start(ID, OFFER)
    assert await phases(pool) == {ID: Phase.ACTIVE}
    server.land(NAME)
    assert await phases(pool) == {ID: Phase.ACTIVE}
    await pool.stop(ID)
    assert await phases(pool) == {}
    assert server.clusters == {}


async def test_a_launch_that_fails_says_why(pool: SkyPilotPool, server: ScriptedSky) -> None:
    await pool.start(ID, OFFER)
    server.fail(NAME, RuntimeError("no A100 left in us-x1"))
    (handle,) = await pool.machines()
    assert handle.phase is Phase.FAILED
    assert "no A100 left in us-x1" in handle.detail
    with pytest.raises(Refused, match="no A100 left"):
        await pool.start(ID, OFFER)
    await pool.stop(ID)
    assert await phases(pool) == {}


async def test_what_a_failed_launch_left_behind_is_taken_down(pool: SkyPilotPool, server: ScriptedSky) -> None:
    await pool.start(ID, OFFER)
    server.fail(NAME, RuntimeError("half of it came up"), leaves={"init_kind": "unhealthy"})
    for _ in range(2):
        assert await phases(pool) == {ID: Phase.FAILED}
        assert server.clusters == {}
    await pool.stop(ID)
    assert await phases(pool) == {}


async def test_a_machine_that_runs_is_no_failure_whatever_became_of_its_launch(
    pool: SkyPilotPool, server: ScriptedSky
) -> None:
    await pool.start(ID, OFFER)
    server.fail(NAME, RuntimeError("Failed to get request: 404"), leaves={"status": "UP", "init_kind": None})
    assert await phases(pool) == {ID: Phase.ACTIVE}
    assert NAME in server.clusters


async def test_a_start_in_the_middle_of_a_look_does_not_hold_the_look_up(
    pool: SkyPilotPool, server: ScriptedSky, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = pool._sdk.unfinished

    async def then_start() -> Any:
        monkeypatch.setattr(pool._sdk, "unfinished", ask)
        found = await ask()
        await pool.start(ID, OFFER)
        return found

    monkeypatch.setattr(pool._sdk, "unfinished", then_start)
    async with asyncio.timeout(10):
        assert await phases(pool) == {ID: Phase.ACTIVE}


async def test_clouds_are_asked_about_machines_that_run_and_a_preempted_one_is_lost(
    pool: SkyPilotPool, server: ScriptedSky
) -> None:
    await pool.start(ID, OFFER)
    await pool.machines()
    assert server.asked_clouds == [], "a cluster that is being launched is locked"
    server.land(NAME)
    await pool.machines()
    assert server.asked_clouds == [(NAME,)]
    del server.clusters[NAME]
    assert await phases(pool) == {ID: Phase.LOST}
    await pool.stop(ID)
    assert await phases(pool) == {}


async def test_a_machine_whose_worker_ended_is_on_its_way_out(pool: SkyPilotPool, server: ScriptedSky) -> None:
    await pool.start(ID, OFFER)
    server.land(NAME, status="AUTOSTOPPING")
    assert await phases(pool) == {ID: Phase.DRAINING}


async def test_clusters_of_others_are_not_the_runs(pool: SkyPilotPool, server: ScriptedSky) -> None:
    for name in ("somebodys", cluster_name("run-2", ID)):
        server.clusters[name] = {"status": "UP", "labels": {"echo2-machine": ID, "echo2-offer": OFFER}}
    assert await phases(pool) == {}
    assert server.asked_clouds == []


async def test_clouds_that_do_not_answer_in_time_are_asked_once_and_their_answer_is_used_later(
    pool: SkyPilotPool, server: ScriptedSky
) -> None:
    await pool.start(ID, OFFER)
    server.land(NAME)
    server.silent_clouds = True
    for _ in range(2):
        looking = asyncio.create_task(pool.machines())
        while not server.waited_for_clouds.is_set():
            await asyncio.sleep(0.001)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
    server.answer_clouds()
    assert await phases(pool) == {ID: Phase.ACTIVE}
    assert len(server.asked_clouds) == 1


async def test_an_answer_that_is_older_than_a_stop_brings_nothing_back(pool: SkyPilotPool, server: ScriptedSky) -> None:
    await pool.start(ID, OFFER)
    server.land(NAME)
    server.silent_clouds = True
    looking = asyncio.create_task(pool.machines())
    while not server.waited_for_clouds.is_set():
        await asyncio.sleep(0.001)
    await pool.stop(ID)
    server.answer_clouds()
    assert await looking == ()
    assert await phases(pool) == {}


# ---- stop ----------------------------------------------------------------------------------------------------------


async def test_stopping_what_is_not_there_is_no_error(pool: SkyPilotPool) -> None:
    await pool.stop(ID)
    await pool.stop("never-heard-of")


async def test_stopping_a_machine_that_is_being_launched_cancels_the_launch(
    pool: SkyPilotPool, server: ScriptedSky
) -> None:
    await pool.start(ID, OFFER)
    await pool.stop(ID)
    assert [request.status for request in server.requests.values() if request.kind == "launch"] == ["CANCELLED"]
    assert server.clusters == {}


async def test_a_stop_waits_for_a_start_that_was_given_up_and_takes_down_what_came_of_it(
    pool: SkyPilotPool, server: ScriptedSky
) -> None:
    await give_up_a_start(pool, server)
    stopping = asyncio.create_task(pool.stop(ID))
    await asyncio.sleep(0.01)
    assert not stopping.done()
    server.gate.set()
    await stopping
    assert len(server.launched) == 1
    assert server.clusters == {}


async def test_a_stop_that_fails_is_told_and_can_be_tried_again(pool: SkyPilotPool, server: ScriptedSky) -> None:
    await pool.start(ID, OFFER)
    server.land(NAME)
    server.errors["down"] = RuntimeError("the cloud said no")
    with pytest.raises(Refused, match="the cloud said no"):
        await pool.stop(ID)
    assert await phases(pool) == {ID: Phase.ACTIVE}
    await pool.stop(ID)
    assert server.clusters == {}


# ---- after a restart -----------------------------------------------------------------------------------------------


async def test_machines_of_an_earlier_life_are_found_and_can_be_stopped(
    pool: SkyPilotPool, server: ScriptedSky, folder: Path, invite: Invitations, clock: StillClock
) -> None:
    await pool.start(ID, OFFER)
    server.land(NAME)
    later = await another_life(folder, invite, clock, workload=None)  # it has not even looked at the prices
    (handle,) = await later.machines()
    assert (handle.machine_id, handle.offer, handle.phase) == (ID, OFFER, Phase.ACTIVE)
    assert handle.usd_per_h == pytest.approx(1.2)
    await later.stop(ID)
    assert server.clusters == {}


@pytest.mark.parametrize("landed", [True, False])
async def test_a_start_that_an_earlier_life_made_is_not_made_again(
    pool: SkyPilotPool, server: ScriptedSky, folder: Path, invite: Invitations, clock: StillClock, landed: bool
) -> None:
    await pool.start(ID, OFFER)
    if landed:
        server.land(NAME)
    later = await another_life(folder, invite, clock)
    handle = await later.start(ID, OFFER)
    assert (handle.offer, handle.usd_per_h) == (OFFER, pytest.approx(1.2))
    assert await phases(later) == {ID: Phase.ACTIVE}
    assert len(server.launched) == 1
    assert invite.asked == [ID]


async def test_a_launch_that_an_earlier_life_began_is_cancelled_by_a_stop(
    pool: SkyPilotPool, server: ScriptedSky, folder: Path, invite: Invitations, clock: StillClock
) -> None:
    await pool.start(ID, OFFER)
    later = await another_life(folder, invite, clock)
    await later.stop(ID)
    assert server.clusters == {}
    assert all(request.status != "RUNNING" for request in server.requests.values())


async def test_a_cluster_of_the_run_that_nobody_can_read_is_lost_and_can_be_stopped(
    pool: SkyPilotPool, server: ScriptedSky
) -> None:
    server.clusters[NAME] = {"status": "UP", "labels": {}}
    assert await phases(pool) == {NAME: Phase.LOST}
    await pool.stop(NAME)
    assert server.clusters == {}
