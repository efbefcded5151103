from __future__ import annotations

import pytest
from scripted_sky import CATALOGS

from echo2.errors import UserError
from echo2.provisioning.pools.skypilot_market import Rentable, rentals
from echo2.provisioning.pools.skypilot_worker import WorkerPlan, order
from echo2.provisioning.prices.skypilot import parse_catalog


def test_an_order_is_the_machine_of_the_row_with_the_plan_on_it() -> None:
    quotes = parse_catalog(CATALOGS["vast/vms.csv"].encode(), "vast").quotes
    (rental,) = rentals(quotes, [Rentable(cloud="vast", gpu="RTX5090", rollouts_per_s=0.2)]).values()
    plan = WorkerPlan(image="docker:example/echo2", install="pip install echo2\n", disk_gb=80, idle_minutes=7)
    made = order("run-1", "vast-1", rental, plan)
    assert (made.infra, made.instance_type, made.use_spot) == ("vast/Utah, US, NA", "1x-5090", False)
    assert (made.accelerator, made.accelerators) == ("RTX5090", 1)
    assert (made.image, made.disk_gb, made.idle_minutes) == ("docker:example/echo2", 80, 7)
    assert made.labels == {
        "echo2-machine": "vast-1",
        "echo2-offer": "vast-1x-5090-utah-us-na",
        "echo2-microusd-per-h": "500000",
    }
    assert made.run == "set -e\npip install echo2\nexec echo2 worker --name vast-1"


def test_without_anything_to_install_the_worker_is_all_that_runs() -> None:
    assert WorkerPlan().command("a-1") == "set -e\nexec echo2 worker --name a-1"


def test_a_plan_in_range_is_demanded() -> None:
    with pytest.raises(UserError, match="idle_minutes must be from 1 to 60, got 0"):
        WorkerPlan(idle_minutes=0)
    with pytest.raises(UserError, match="disk_gb must be at least 0, got -1"):
        WorkerPlan(disk_gb=-1)
