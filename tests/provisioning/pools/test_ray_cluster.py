"""The ray pool on a real Ray cluster of three nodes on this machine, with a stand-in worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'echo2[ray]'")

from ray.cluster_utils import Cluster

from echo2.errors import TransportError
from echo2.provisioning.observation import Phase
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.pool import Handle
from echo2.provisioning.pools.ray import RayPool
from echo2.provisioning.pools.ray_machine import WORKER
from echo2.provisioning.pools.ray_offers import Needs, RayOffer
from echo2.shell import SystemClock

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
STAND_IN = ROOT / "tests" / "support" / "stand_in_worker.py"
LIMIT_S = 90.0
"""For whatever is waited for; Ray itself calls a node dead within some twenty seconds."""
NODE = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 * 2**20}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "src"),
    "RAY_AUTH_MODE": "disabled",  # or Ray leaves a token in the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",  # a driver ends so long after the head
    "RAY_DEDUP_LOGS": "0",
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, Any]]:
    """A cluster: a head and the nodes ``near`` and ``far``, each with one of a resource by its name."""
    short = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)  # as socket paths must be
    with pytest.MonkeyPatch.context() as patch, short as folder:
        for name, value in (*ENVIRONMENT.items(), ("RAY_TMPDIR", folder)):
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        try:
            made = {name: cluster.add_node(**NODE, resources={name: 1}) for name in ("near", "far")}
            yield {"cluster": cluster, **made}
        finally:
            cluster.shutdown()


def offered(name: str, **custom: float) -> RayOffer:
    offer = Offer(name=name, gpu="none", count=8, usd_per_h=1.5, rollouts_per_s=1.0)
    return RayOffer(offer, Needs(cpus=1.0, custom=custom))


class Site:
    """Pools on the cluster, and what their workers left on the disk."""

    def __init__(self, nodes: dict[str, Any], folder: Path, name: str) -> None:
        self.nodes, self.folder, self.run_id = nodes, folder, name
        self.behaviour = "leaves on SIGTERM"

    def pool(self, *offers: RayOffer, program: tuple[str, ...] = (str(STAND_IN),)) -> RayPool:
        async def invite(machine_id: str) -> str:
            return self.behaviour

        return RayPool(
            self.run_id, offers or [offered("any")], invite, SystemClock(), self.folder / "ray.log",
            address=self.nodes["cluster"].address, folder=str(self.folder), program=program,
        )  # fmt: skip

    def log(self, machine_id: str) -> str:
        path = self.folder / self.run_id / machine_id / "worker.log"
        return path.read_text() if path.exists() else ""

    def pid(self, machine_id: str) -> int:
        (line,) = [line for line in self.log(machine_id).splitlines() if line.startswith("pid ")]
        return int(line.split()[1])

    def runs(self, machine_id: str) -> bool:
        try:
            return Path(f"/proc/{self.pid(machine_id)}/stat").read_text().split()[2] != "Z"
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return False


@pytest.fixture
def site(nodes: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    return Site(nodes, tmp_path, request.node.originalname)


@pytest.fixture
async def pool(site: Site) -> AsyncIterator[RayPool]:
    async with site.pool() as pool:
        yield pool
        await stop_all(pool)


async def stop_all(pool: RayPool) -> None:
    await asyncio.gather(*(pool.stop(handle.machine_id) for handle in await pool.machines()))


async def machine(pool: RayPool, machine_id: str, phase: Phase) -> Handle:
    """The machine, once it is in ``phase``."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = {handle.machine_id: handle for handle in await pool.machines()}
            if machine_id in found and found[machine_id].phase is phase:
                return found[machine_id]
            await asyncio.sleep(0.2)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.1)


async def room(pool: RayPool, machines: int) -> None:
    """Until the cluster has room for so many machines of the only offer, those that run included."""
    async with asyncio.timeout(LIMIT_S):
        while [listing.offer.count for listing in await pool.listings()] != ([machines] if machines else []):
            await asyncio.sleep(0.2)


async def test_an_id_is_one_machine_however_often_it_is_started_and_none_once_it_is_stopped(
    site: Site, pool: RayPool
) -> None:
    await room(pool, 4)
    first, second = await asyncio.gather(pool.start("any-1", "any"), pool.start("any-1", "any"))
    assert first == second == await pool.start("any-1", "any")
    running = await machine(pool, "any-1", Phase.ACTIVE)
    assert (running.offer, running.usd_per_h) == ("any", 1.5)
    await until(lambda: site.runs("any-1"))
    assert len(await pool.machines()) == 1
    await room(pool, 4)
    await pool.stop("any-1")
    assert site.log("any-1").endswith("left in order\n"), "and only one worker wrote there"
    assert not site.runs("any-1")
    assert await pool.machines() == []
    await pool.stop("any-1")
    await pool.stop("any-2")


async def test_a_machine_is_where_its_resources_are_and_waits_where_there_are_none(site: Site) -> None:
    async with site.pool(offered("far", far=1.0)) as pool:
        await room(pool, 1)
        await pool.start("far-1", "far")
        await machine(pool, "far-1", Phase.ACTIVE)
        await room(pool, 1)
        await pool.start("far-2", "far")  # more than is offered
        for _ in range(2):
            waiting = await machine(pool, "far-2", Phase.STARTING)
        assert waiting.detail == "not placed yet"
    async with site.pool(offered("far", far=1.0)) as pool:
        assert (await machine(pool, "far-2", Phase.STARTING)).offer == "far", "also for a later life"
        await pool.stop("far-2")
        assert [handle.machine_id for handle in await pool.machines()] == ["far-1"]
        await stop_all(pool)
        assert site.log("far-2") == ""


async def test_a_later_life_finds_the_machines_of_its_run_and_no_other(site: Site) -> None:
    async with site.pool() as pool:
        await pool.start("any-1", "any")
        await machine(pool, "any-1", Phase.ACTIVE)
        await until(lambda: site.runs("any-1"))
    assert site.runs("any-1"), "the coordinator's end is not the machine's"
    other = Site(site.nodes, site.folder, "other")
    async with other.pool() as pool:
        assert await pool.machines() == []
        await room(pool, 3)
    async with site.pool() as pool:
        found = await machine(pool, "any-1", Phase.ACTIVE)
        assert (found.offer, found.usd_per_h) == ("any", 1.5)
        await pool.start("any-1", "any")
        await stop_all(pool)
        assert not site.runs("any-1")


async def test_a_worker_that_ends_takes_its_machine_with_it_also_when_no_coordinator_is_there(site: Site) -> None:
    async with site.pool() as pool:
        await pool.start("any-1", "any")
        await until(lambda: site.runs("any-1"))
    os.kill(site.pid("any-1"), signal.SIGTERM)  # as an orphaned worker ends by itself
    async with site.pool() as pool:
        await room(pool, 4)
        async with asyncio.timeout(LIMIT_S):
            while any(handle.phase is Phase.ACTIVE for handle in await pool.machines()):
                await asyncio.sleep(0.2)
        await stop_all(pool)


@pytest.mark.parametrize(("code", "phase"), [(1, Phase.LOST), (2, Phase.FAILED)])
async def test_what_a_worker_ended_with_is_told(site: Site, pool: RayPool, code: int, phase: Phase) -> None:
    site.behaviour = f"ends with {code}: this run has ended"
    await pool.start("any-1", "any")
    ended = await machine(pool, "any-1", phase)
    assert ended.detail == f"its worker ended with exit code {code}: this run has ended"
    assert (await machine(pool, "any-1", phase)) == ended, "until it is stopped"
    await room(pool, 4)


async def test_a_line_that_dies_is_begun_again_and_costs_no_machine(site: Site, pool: RayPool) -> None:
    await pool.start("any-1", "any")
    await machine(pool, "any-1", Phase.ACTIVE)
    os.kill(line_of(pool), signal.SIGKILL)
    await until(lambda: pool._line._process is None)
    assert (await machine(pool, "any-1", Phase.ACTIVE)).offer == "any"
    await pool.stop("any-1")
    assert not site.runs("any-1")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A real one, whose workers miss it after five seconds, and its run folder."""
    config, folder = tmp_path / "run.toml", tmp_path / "runs" / "run"
    config.write_text('rollout.engine = "scripted"\nworkers.orphan_after_s = 5.0\n')
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "echo2", "coordinator", str(config)]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        yield folder, process
        process.kill()


async def test_the_real_worker_joins_as_its_machine_and_the_machine_ends_when_its_coordinator_is_gone(
    site: Site, coordinator: tuple[Path, subprocess.Popen[bytes]]
) -> None:
    folder, process = coordinator
    await until((folder / "coordinator.json").exists)
    site.behaviour = (folder / "join" / "worker").read_text()
    async with site.pool(program=WORKER) as pool:
        await pool.start("any-1", "any")
        await until(lambda: "worker any-1: joined" in site.log("any-1"))
        assert (await machine(pool, "any-1", Phase.ACTIVE)).detail == ""
        process.kill()
        lost = await machine(pool, "any-1", Phase.LOST)
        assert "its worker ended with exit code 1" in lost.detail
        await room(pool, 4)
        await stop_all(pool)


@pytest.mark.slow
async def test_a_node_that_stood_still_until_it_was_given_up_runs_nothing_when_it_goes_on(site: Site) -> None:
    node = site.nodes["cluster"].add_node(**NODE, resources={"frozen": 1})
    async with site.pool(offered("frozen", frozen=1.0)) as pool:
        await pool.start("frozen-1", "frozen")
        await until(lambda: site.runs("frozen-1"))
        raylet = node.all_processes["raylet"][0].process.pid
        stopped = [raylet, *children(raylet)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert "node has died" in (await machine(pool, "frozen-1", Phase.LOST)).detail
        await pool.stop("frozen-1")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: not site.runs("frozen-1"))
    site.nodes["cluster"].remove_node(node, allow_graceful=False)


async def test_a_killed_node_is_a_lost_machine_and_its_worker_ends(site: Site) -> None:
    async with site.pool(offered("near", near=1.0), offered("any")) as pool:
        await asyncio.gather(pool.start("near-1", "near"), pool.start("any-1", "any"))
        await machine(pool, "near-1", Phase.ACTIVE)
        await until(lambda: site.runs("near-1"))
        site.nodes["cluster"].remove_node(site.nodes["near"], allow_graceful=False)
        lost = await machine(pool, "near-1", Phase.LOST)
        assert "died" in lost.detail
        await until(lambda: not site.runs("near-1"))
        assert "near" not in {listing.offer.name for listing in await pool.listings()}
        await stop_all(pool)
        assert await pool.machines() == []


async def test_a_head_that_is_gone_is_told_within_the_deadline_and_takes_nobody_with_it(site: Site) -> None:
    """The last one: nothing is left of the cluster."""
    async with site.pool() as pool:
        await pool.machines()
        site.nodes["cluster"].head_node.kill_gcs_server()
        for _ in range(2):  # the line ends; another does not connect
            with pytest.raises(TransportError):
                async with asyncio.timeout(30.0):
                    await pool.machines()


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def line_of(pool: RayPool) -> int:
    process = pool._line._process
    assert process is not None
    return process.pid
