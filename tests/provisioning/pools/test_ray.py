"""The pool's own part, without Ray: its line leads to a scripted process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from echo2.errors import Refused, TransportError, UserError
from echo2.provisioning.observation import Phase
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools import ray as ray_module
from echo2.provisioning.pools import ray_line
from echo2.provisioning.pools.pool import Pool
from echo2.provisioning.pools.ray import RayPool
from echo2.provisioning.pools.ray_offers import Needs, RayOffer
from echo2.shell import SystemClock

DRIVER = Path(__file__).parents[2] / "support" / "scripted_ray_driver.py"
OFFERS = [
    RayOffer(
        Offer(name=name, gpu="A100", count=8, usd_per_h=2.5, rollouts_per_s=1.0, min_rental_h=1.0), Needs(cpus=1.0)
    )
    for name in ("c", "refused", "dies", "hangs", "babble")
]


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        (folder / "machines").write_text("[]")
        (folder / "nodes").write_text("3")

    def pool(self, offers: list[RayOffer] = OFFERS) -> RayPool:
        driver = (sys.executable, str(DRIVER), str(self.folder))
        return RayPool("run-1", offers, self.invite, SystemClock(), self.folder / "logs" / "ray.log", driver=driver)

    async def invite(self, machine_id: str) -> str:
        self.asked.append(machine_id)
        return f"join-{len(self.asked)}"

    @property
    def lives(self) -> int:
        return len((self.folder / "lives").read_text().splitlines())


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture
async def pool(cluster: Cluster) -> AsyncIterator[RayPool]:
    async with cluster.pool() as pool:
        yield pool


pytestmark = pytest.mark.integration


async def test_an_order_is_one_machine_with_one_invitation(cluster: Cluster, pool: RayPool) -> None:
    as_pool: Pool = pool
    ordered = await as_pool.start("c-1", "c")
    assert (ordered.machine_id, ordered.offer, ordered.phase, ordered.usd_per_h) == ("c-1", "c", Phase.STARTING, 2.5)
    assert await pool.start("c-1", "c") == ordered
    assert (cluster.folder / "joins").read_text() == "c-1 join-1\n"
    assert (cluster.folder / "namespace").read_text() == "echo2-run-1"
    (seen,) = await pool.machines()
    assert (seen.phase, seen.paid_until_s) == (Phase.ACTIVE, ordered.paid_until_s)


async def test_it_lists_what_the_cluster_has_room_for(cluster: Cluster) -> None:
    async with cluster.pool(OFFERS[:1]) as pool:
        (listing,) = await pool.listings()
        assert (listing.offer.count, listing.prices[0].usd_per_h) == (3, 2.5)
        await pool.start("c-1", "c")
        (listing,) = await pool.listings()
        assert listing.offer.count == 3
        (cluster.folder / "nodes").write_text("1")
        (listing,) = await pool.listings()
        assert listing.offer.count == 1
        await pool.stop("c-1")
        (cluster.folder / "nodes").write_text("0")
        assert await pool.listings() == []


async def test_stopped_machines_are_gone_and_unknown_ones_no_error(pool: RayPool) -> None:
    await pool.start("c-1", "c")
    await pool.stop("c-1")
    await pool.stop("c-1")
    await pool.stop("never-1")
    assert await pool.machines() == []


async def test_what_the_cluster_does_not_have_any_more_is_lost_until_it_is_stopped(
    cluster: Cluster, pool: RayPool
) -> None:
    await pool.start("c-1", "c")
    (cluster.folder / "machines").write_text("[]")
    for _ in range(2):
        (handle,) = await pool.machines()
        assert handle.phase is Phase.LOST
    assert (await pool.start("c-1", "c")).phase is Phase.LOST, "an id is started once"
    await pool.stop("c-1")
    assert await pool.machines() == []


async def test_a_later_life_finds_the_machines_with_prices_and_what_is_paid(cluster: Cluster) -> None:
    async with cluster.pool() as pool:
        ordered = await pool.start("c-1", "c")
    async with cluster.pool() as pool:
        (found,) = await pool.machines()
    assert (found.machine_id, found.offer, found.phase, found.usd_per_h) == ("c-1", "c", Phase.ACTIVE, 2.5)
    assert found.paid_until_s == pytest.approx(ordered.paid_until_s - 100.0, abs=30.0)  # it says it is 100 s old
    async with cluster.pool(OFFERS[1:]) as pool:
        (found,) = await pool.machines()
    assert found.usd_per_h == 2.5, "also where its offer is not configured any more"


async def test_a_refusal_says_why_and_an_unknown_offer_is_one(pool: RayPool) -> None:
    with pytest.raises(Refused, match="Ray refused: no such resource"):
        await pool.start("refused-1", "refused")
    with pytest.raises(Refused, match="offers are babble, c, dies, hangs, refused, got tpu"):
        await pool.start("tpu-1", "tpu")
    assert await pool.machines() == []


@pytest.mark.parametrize("behaviour", ["dies", "babble"])
async def test_a_line_that_ends_is_said_so_and_the_next_call_begins_another(
    cluster: Cluster, pool: RayPool, behaviour: str
) -> None:
    with pytest.raises(TransportError, match="the process of the ray pool ended"):
        await pool.start(f"{behaviour}-1", behaviour)
    (found,) = await pool.machines()
    assert (found.machine_id, found.phase, cluster.lives) == (f"{behaviour}-1", Phase.ACTIVE, 2)


async def test_a_call_that_is_given_up_leaves_the_line_as_it_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_line, "END_S", 0.1)
    async with cluster.pool() as pool:
        await pool.machines()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pool.start("hangs-1", "hangs")
        assert cluster.lives == 1, "it is ended by force when the pool is left"


async def test_a_cluster_that_cannot_be_reached_is_told_and_tried_again(cluster: Cluster, pool: RayPool) -> None:
    (cluster.folder / "unreachable").touch()
    with pytest.raises(TransportError, match="Ray could not be reached: nobody at auto"):
        await pool.machines()
    (cluster.folder / "unreachable").unlink()
    assert await pool.machines() == []


async def test_a_line_that_never_connects_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_line, "CONNECT_S", 0.3)
    silent = (sys.executable, "-c", "import sys; sys.stdin.read()")
    async with RayPool("r", OFFERS, cluster.invite, SystemClock(), tmp_path / "ray.log", driver=silent) as pool:
        with pytest.raises(TransportError, match=r"Ray at auto did not answer within 0.3 s"):
            await pool.machines()


def test_names_of_offers_must_differ(cluster: Cluster) -> None:
    with pytest.raises(UserError, match="must differ"):
        cluster.pool([OFFERS[0], OFFERS[0]])


def test_without_ray_the_user_is_told_what_to_install(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"install echo2\[ray\]"):
        RayPool("r", OFFERS, cluster.invite, SystemClock(), cluster.folder / "ray.log")


def test_neither_the_commands_nor_the_pool_import_ray() -> None:
    code = "import sys, echo2.cli.app, echo2.provisioning.pools.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
