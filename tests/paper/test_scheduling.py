"""§3.5, §4.3 and B.2.1: the scheduler keeps μ_pool at γ·μ_min, by rising ρ, at low frequency."""

from __future__ import annotations

from closed_loop import ClosedLoop, Seller, offer, rules

from echo2.provisioning.decisions import Activate, Release
from echo2.provisioning.observation import Phase


def test_the_cheapest_set_that_exceeds_gamma_mu_min_is_activated() -> None:
    """T_train = 100 s, T_bcast = 100 s, κ = 2, R = 100: μ_min = 2·100/(2·100 − 100) = 2/s, the target 2.2/s.

    ρ: a 2.0, b 3.0, c 5.0 USD/h per trajectory/s. All four of a bring 1.6; 0.6 more is two of b.
    """
    sellers = [Seller(offer("a", 0.8, 0.4, 4)), Seller(offer("b", 0.9, 0.3, 4)), Seller(offer("c", 1.0, 0.2, 99))]
    loop = ClosedLoop(rules(rule="paper"), sellers, t_bcast_s=100.0, exact=True)
    loop.run(5)
    assert {name: loop.count(name) for name in "abc"} == {"a": 4, "b": 2, "c": 0}


def test_capacity_that_stays_below_the_target_activates_and_capacity_well_above_releases_the_dear() -> None:
    sellers = [Seller(offer("a", 0.8, 0.4, 4)), Seller(offer("b", 0.9, 0.3, 9))]
    loop = ClosedLoop(rules(rule="paper"), sellers, t_bcast_s=100.0, exact=True)
    loop.run(5)
    loop.t_bcast_s = 120.0  # μ_min = 200/80 = 2.5, the target 2.75
    loop.run(5)
    assert {name: loop.count(name) for name in "ab"} == {"a": 4, "b": 4}
    loop.t_bcast_s = 0.0  # μ_min = 1, the target 1.1: a alone is enough, and three of it
    loop.run(5)
    assert {name: loop.count(name) for name in "ab"} == {"a": 3, "b": 0}
    kinds = [type(decision) for decision in loop.actions()]
    assert kinds == [Activate, Activate, Activate, Release, Release, Release, Release, Release]


def test_mu_pool_counts_only_workers_whose_heartbeats_arrive() -> None:
    """Equation (4): a_i·μ_i."""
    loop = ClosedLoop(rules(), [Seller(offer("a", 0.8, 0.4, 9))], exact=True)
    loop.run(5)
    assert len(loop.of(Phase.ACTIVE)) == 3
    loop.machines["a-1"].heard = False
    loop.run(2)
    assert loop.true_per_s >= 1.1
    assert loop.count("a") == 4
