"""The pools of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from echo2.config.load import build_config
from echo2.config.root import Config
from echo2.coordinator.pools import pools_of
from echo2.errors import ConfigError, UserError
from echo2.provisioning.pools.pool import Pool
from echo2.provisioning.pools.standby import Volunteer
from echo2.run.folder import RunFolder
from echo2.shell import SystemClock

OFFERS = "name,gpu,count,usd_per_h,rollouts_per_s\nhere,cpu,2,0.5,0.5\n"


class NoBenches:
    def volunteers(self) -> Sequence[Volunteer]:
        return []

    def call(self, worker_id: str, machine_id: str) -> None: ...

    def rest(self, worker_id: str) -> None: ...


async def invite(machine_id: str) -> str:
    return "join"


def config(*pools: dict[str, Any]) -> Config:
    return build_config({"rollout": {"engine": "scripted"}, "pools": list(pools)})


def made(tmp_path: Path, *pools: dict[str, Any]) -> Sequence[Pool]:
    return pools_of(config(*pools), RunFolder(tmp_path), "run-1", SystemClock())(invite, NoBenches())


@pytest.fixture
def offers(tmp_path: Path) -> str:
    path = tmp_path / "offers.csv"
    path.write_text(OFFERS)
    return str(path)


async def test_each_table_is_a_pool_in_the_order_of_the_file(tmp_path: Path, offers: str) -> None:
    pools = made(tmp_path, {"kind": "standby", "rollouts_per_s": 2.0}, {"kind": "local", "offers": offers})
    assert [pool.name for pool in pools] == ["standby", "local"]
    assert [listing.offer.name for listing in await pools[1].listings()] == ["here"]


def test_a_pool_of_processes_needs_a_list_of_offers() -> None:
    for kind in ("local", "ray"):
        with pytest.raises(ConfigError, match=rf"pools\.0\.offers must be a CSV file of offers for kind {kind}"):
            config({"kind": kind})


def test_a_kind_is_there_once_and_pools_need_the_mode_that_plans_capacity() -> None:
    with pytest.raises(ConfigError, match="standby 2 times"):
        config({"kind": "standby"}, {"kind": "standby"})
    with pytest.raises(ConfigError, match=r"need run\.mode"):
        build_config({"rollout": {"engine": "scripted"}, "run": {"mode": "sync"}, "pools": [{"kind": "standby"}]})


def test_unknown_options_are_refused_by_name(tmp_path: Path, offers: str) -> None:
    with pytest.raises(UserError, match=r"options of the ray pool: .*adress"):
        made(tmp_path, {"kind": "ray", "offers": offers, "options": {"adress": "auto"}})
    with pytest.raises(UserError, match=r"options of the skypilot pool: .*machines"):
        made(tmp_path, {"kind": "skypilot"})
    with pytest.raises(UserError, match=r"options of the skypilot pool: .*clod"):
        made(tmp_path, {"kind": "skypilot", "options": {"machines": [{"clod": "gcp", "gpu": "H100"}]}})


def test_bad_offers_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    path = tmp_path / "offers.csv"
    path.write_text(OFFERS.replace("0.5,0.5", "-1,0.5"))
    with pytest.raises(UserError, match=r"row 2.*usd_per_h"):
        made(tmp_path, {"kind": "local", "offers": str(path)})


def test_a_name_that_no_folder_can_have_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    path = tmp_path / "offers.csv"
    path.write_text(OFFERS.replace("here", "rack/1"))
    with pytest.raises(UserError, match="must have no slash"):
        made(tmp_path, {"kind": "local", "offers": str(path)})


def test_two_pools_cannot_have_an_offer_of_the_same_name(tmp_path: Path, offers: str) -> None:
    """The controller tells them apart by it."""
    pools = {"kind": "local", "offers": offers}, {"kind": "ray", "offers": offers}
    with pytest.raises(UserError, match="must have different names, got 'here' in two pools"):
        made(tmp_path, *pools)
