"""Equation (3) with numbers worked by hand: the paper's 8B run, a pool for S = 3 from three kinds of machines.

mu_min = 4096 / 1952.4 = 2.0979 trajectories/s, times gamma = 1.1: 2.3077 (tests/paper/test_capacity_equations.py).
"""

from __future__ import annotations

import pytest

from echo2.provisioning import selection
from echo2.provisioning.capacity import mu_min
from echo2.provisioning.offers import Offer
from echo2.provisioning.selection import Selection, cheapest, exact, greedy, within_budget

TARGET = 1.1 * mu_min(t_train_s=1631.2, t_bcast_s=1310.0, publish_period=2, rollouts_per_step=2048)
OFFERS = (
    Offer(name="5090", gpu="RTX5090", count=10, usd_per_h=0.51, rollouts_per_s=0.20),  # rho 2.55
    Offer(name="4090", gpu="RTX4090", count=40, usd_per_h=0.40, rollouts_per_s=0.10),  # rho 4.00
    Offer(name="a100", gpu="A100-80GB", count=8, usd_per_h=5.03, rollouts_per_s=0.50),  # rho 10.06
)


def machines(chosen: Selection) -> dict[str, int]:
    return {pick.offer.name: pick.machines for pick in chosen.picks}


def test_the_pool_of_least_cost() -> None:
    # ten of the first deliver 2.0; the missing 0.3077 takes four of the second: 5.10 + 1.60 = 6.70 USD/h
    for policy in (greedy, cheapest):
        chosen = policy(OFFERS, TARGET)
        assert machines(chosen) == {"5090": 10, "4090": 4}
        assert chosen.usd_per_h == pytest.approx(6.70)
        assert chosen.mu_per_s == pytest.approx(2.40)


def test_the_integer_program_agrees() -> None:
    pytest.importorskip("scipy")
    assert machines(exact(OFFERS, TARGET)) == {"5090": 10, "4090": 4}


def test_without_cost_awareness_the_pool_is_dearer() -> None:
    costs = [selection.random(OFFERS, TARGET, seed=seed).usd_per_h for seed in range(50)]
    assert min(costs) > 6.70
    assert sum(costs) / len(costs) > 1.5 * 6.70


def test_the_same_money_buys_the_same_pool() -> None:
    assert machines(within_budget(OFFERS, 6.70)) == {"5090": 10, "4090": 4}
