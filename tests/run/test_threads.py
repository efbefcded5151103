from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo2.config.root import Config
from echo2.run import threads
from echo2.run.folder import RunFolder
from echo2.run.launch import specs_of
from echo2.run.threads import worker_threads

OFFERS = "name,gpu,count,usd_per_h,rollouts_per_s\nhere,cpu,2,0.02,1\n"


def config(**tables: Any) -> Config:
    return Config.model_validate({"model": {"path": "tiny:qwen3"}, "tasks": [{"name": "arithmetic"}], **tables})


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 12)


@pytest.mark.parametrize(("local", "each"), [(1, 6), (2, 4), (5, 2), (40, 1), (0, 12)])
def test_local_workers_share_the_machine_with_the_learner(local: int, each: int) -> None:
    assert worker_threads(config(workers={"local": local})) == each


def test_a_number_in_the_configuration_is_taken_as_it_is() -> None:
    assert worker_threads(config(workers={"local": 3, "threads": 9})) == 9


def test_workers_of_the_local_pool_run_beside_the_local_ones(tmp_path: Path) -> None:
    (tmp_path / "offers.csv").write_text(OFFERS)
    pools = [{"kind": "local", "offers": str(tmp_path / "offers.csv")}]
    assert worker_threads(config(workers={"local": 1}, pools=pools)) == 3


def test_every_worker_that_a_run_starts_is_told_its_share(tmp_path: Path) -> None:
    specs = specs_of(config(workers={"local": 3}), RunFolder(tmp_path))
    assert [spec.threads for spec in specs.workers] == [3, 3, 3]
    for spec in specs.workers:
        assert spec.arguments[spec.arguments.index("--threads") + 1] == "3"
