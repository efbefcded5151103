from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.provisioning import selection
from echo2.provisioning.capacity import Infeasible
from echo2.provisioning.offers import Offer, Terms, effective_usd_per_h
from echo2.provisioning.selection import Selection, cheapest, exact, greedy, ranked, within_budget

Policy = Callable[..., Selection]


def offer(name: str, usd_per_h: float, rollouts_per_s: float, count: int = 1, **more: Any) -> Offer:
    return Offer(name=name, gpu="G", count=count, usd_per_h=usd_per_h, rollouts_per_s=rollouts_per_s, **more)


def machines(chosen: Selection) -> dict[str, int]:
    return {pick.offer.name: pick.machines for pick in chosen.picks}


markets = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 200), st.integers(1, 3)), min_size=1, max_size=5).map(
    lambda rows: [offer(f"o{i}", usd / 100, mu / 100, count) for i, (usd, mu, count) in enumerate(rows)]
)
shares = st.floats(0.01, 1.0)


def reach(offers: list[Offer]) -> float:
    return math.fsum(one.count * one.rollouts_per_s for one in offers)


def every_choice(offers: list[Offer]) -> list[tuple[float, float]]:
    """(cost, throughput) of every set of machines."""
    return [
        (
            math.fsum(n * one.usd_per_h for n, one in zip(units, offers, strict=True)),
            math.fsum(n * one.rollouts_per_s for n, one in zip(units, offers, strict=True)),
        )
        for units in product(*(range(one.count + 1) for one in offers))
    ]


def test_the_greedy_takes_rising_cost_per_throughput_until_the_target_is_reached() -> None:
    # rho: a 2.5, b 2.0, c 4.0 USD/h per trajectory/s; the target takes both of b and one of a
    offers = [offer("a", 0.5, 0.2, 4), offer("b", 0.6, 0.3, 2), offer("c", 0.4, 0.1, 9)]
    chosen = greedy(offers, 0.7)
    assert machines(chosen) == {"b": 2, "a": 1}
    assert (chosen.machines, chosen.usd_per_h, chosen.mu_per_s) == (3, pytest.approx(1.7), pytest.approx(0.8))
    assert [pick.usd_per_h for pick in chosen.picks] == [pytest.approx(1.2), pytest.approx(0.5)]


def test_a_cheaper_single_offer_replaces_the_last_pick() -> None:
    # greedy: b, b, a = 1.7; what is missing after b, b is 0.05, which c delivers for 0.4
    offers = [offer("a", 0.5, 0.2, 4), offer("b", 0.6, 0.3, 2), offer("c", 0.4, 0.1, 9)]
    assert machines(cheapest(offers, 0.65)) == {"b": 2, "c": 1}


def test_a_large_machine_is_not_rented_for_a_small_target() -> None:
    # by rho the machine of 16 comes first and costs 6.88; one of 1 is enough
    offers = [offer("16x", 6.88, 3.2), offer("1x", 0.5, 0.2, 20)]
    assert machines(greedy(offers, 0.2)) == {"16x": 1}
    assert machines(cheapest(offers, 0.2)) == {"1x": 1}
    assert machines(cheapest(offers, 3.4)) == {"16x": 1, "1x": 1}


def test_picks_that_a_later_one_makes_needless_are_dropped() -> None:
    # greedy takes small (rho 1) and large (rho 1.1); large alone covers 1.0
    offers = [offer("small", 0.3, 0.3), offer("large", 1.1, 1.0)]
    assert machines(greedy(offers, 1.0)) == {"small": 1, "large": 1}
    assert machines(cheapest(offers, 1.0)) == {"large": 1}


def test_an_exact_fit_rents_no_machine_for_the_last_bit_of_a_double() -> None:
    # 3 · 0.1 is 0.30000000000000004 and 0.1 + 0.2 more than 0.3; three machines reach 0.3 all the same
    offers = [offer("a", 1.0, 0.1, 10)]
    for target in (0.3, 0.1 + 0.2, 0.7, 0.1 * 7):
        assert cheapest(offers, target).machines == round(target * 10)
        assert within_budget(offers, target * 10).machines == round(target * 10)


def test_the_price_of_traffic_decides_between_offers() -> None:
    offers = [offer("dear-traffic", 0.4, 0.2, 9, traffic_usd_per_gb=0.02), offer("free-traffic", 0.5, 0.2, 9)]
    assert machines(cheapest(offers, 0.4)) == {"dear-traffic": 2}
    chosen = cheapest(offers, 0.4, Terms(received_gb_per_h=18.1))
    assert machines(chosen) == {"free-traffic": 2}
    assert chosen.usd_per_h == 1.0


def test_minimum_rental_and_downtime_decide_too() -> None:
    offers = [offer("day", 0.4, 0.2, 9, min_rental_h=24.0), offer("hour", 0.5, 0.2, 9)]
    assert machines(cheapest(offers, 0.2, Terms(rental_h=12.0))) == {"hour": 1}
    shaky = [offer("shaky", 0.5, 0.2, 9, reliability=0.5), offer("steady", 0.6, 0.2, 9)]
    assert machines(cheapest(shaky, 0.2)) == {"steady": 1}


def test_a_selection_says_when_it_rests_on_an_estimate() -> None:
    assert cheapest([offer("a", 1.0, 1.0, estimated=True)], 1.0).estimated
    assert not cheapest([offer("a", 1.0, 1.0)], 1.0).estimated


@pytest.mark.parametrize("policy", [cheapest, greedy, exact, selection.random])
def test_a_target_beyond_all_machines_is_infeasible_and_says_what_is_missing(policy: Policy) -> None:
    with pytest.raises(Infeasible) as caught:
        policy([offer("a", 0.5, 0.2, 4), offer("b", 0.9, 0.3, 1)], 2.1)
    sentence = str(caught.value)
    assert "must deliver 2.1 trajectories/s together, got 1.1 from 5 machines" in sentence
    assert "1 trajectories/s are missing, which 5 more machines like 'a' would deliver" in sentence


def test_a_budget_below_the_cheapest_machine_is_infeasible_and_says_what_is_missing() -> None:
    with pytest.raises(Infeasible, match=r"got 0.3 USD/h where the cheapest costs 0.5 USD/h: raise it by 0.2 USD/h"):
        within_budget([offer("a", 0.5, 0.2, 4), offer("b", 0.9, 0.3, 1)], 0.3)


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_targets_and_budgets_that_are_none_are_refused(number: float) -> None:
    for question in (cheapest, greedy, selection.random, within_budget):
        with pytest.raises(UserError, match="must be more than 0"):
            question([offer("a", 0.5, 0.2)], number)


def test_offers_must_be_there_and_have_names_of_their_own() -> None:
    with pytest.raises(UserError, match="at least one offer"):
        cheapest([], 1.0)
    with pytest.raises(UserError, match="different names, got 'a' more than once"):
        cheapest([offer("a", 0.5, 0.2), offer("a", 0.6, 0.2)], 0.1)


def test_the_random_policy_depends_on_its_seed_and_ignores_prices() -> None:
    offers = [offer(f"o{index}", 1.0 + index, 0.1, 3) for index in range(10)]
    assert selection.random(offers, 1.0, seed=1) == selection.random(offers, 1.0, seed=1)
    costs = {selection.random(offers, 1.0, seed=seed).usd_per_h for seed in range(20)}
    assert len(costs) > 10
    assert min(costs) > cheapest(offers, 1.0).usd_per_h
    dearer = [offer(f"o{index}", 20.0 - index, 0.1, 3) for index in range(10)]
    assert machines(selection.random(dearer, 1.0, seed=5)) == machines(selection.random(offers, 1.0, seed=5))


def test_ranks_go_by_cost_per_throughput_then_size_then_name() -> None:
    # rho 2 for all but d; 0.1/0.05 and 0.6/0.3 differ in the last bit
    offers = [offer("d", 1.0, 0.4), offer("c", 0.1, 0.05), offer("b", 0.6, 0.3), offer("a", 0.6, 0.3)]
    assert [one.name for one in ranked(offers)] == ["a", "b", "c", "d"]


@settings(max_examples=150)
@given(markets, shares, st.randoms(use_true_random=False))
def test_the_order_of_offers_never_matters(offers: list[Offer], share: float, shuffle: Random) -> None:
    target, budget = share * reach(offers), max(share * 5, min(one.usd_per_h for one in offers))
    mixed = shuffle.sample(offers, len(offers))
    assert ranked(mixed) == ranked(offers)
    for policy in (cheapest, greedy, selection.random):
        assert policy(mixed, target) == policy(offers, target)
    assert within_budget(mixed, budget) == within_budget(offers, budget)


@settings(max_examples=150)
@given(markets, shares, st.sampled_from([1 / 3, 0.1, 7.0, 1e-3, 1e3, 60.0]), st.sampled_from([1 / 7, 0.92, 100.0]))
def test_other_units_and_currencies_change_no_choice(
    offers: list[Offer], share: float, per_time: float, per_usd: float
) -> None:
    scaled = [offer(o.name, o.usd_per_h * per_usd, o.rollouts_per_s * per_time, o.count) for o in offers]
    target = round(share * reach(offers), 2) or 0.01
    budget = max(round(share * 5, 2), min(one.usd_per_h for one in offers))
    for policy in (cheapest, greedy, selection.random):
        assert machines(policy(scaled, target * per_time)) == machines(policy(offers, target))
    assert machines(within_budget(scaled, budget * per_usd)) == machines(within_budget(offers, budget))


@settings(max_examples=150)
@given(markets, shares)
def test_every_policy_covers_the_target_with_machines_there_are(offers: list[Offer], share: float) -> None:
    target = share * reach(offers)
    for policy in (cheapest, greedy, selection.random):
        chosen = policy(offers, target)
        assert chosen.mu_per_s >= target * (1 - 1e-8)
        assert all(0 < pick.machines <= pick.offer.count for pick in chosen.picks)
        terms = Terms()
        assert chosen.usd_per_h == pytest.approx(
            sum(pick.machines * effective_usd_per_h(pick.offer, terms) for pick in chosen.picks)
        )


@settings(max_examples=150)
@given(markets, shares)
def test_the_cheapest_is_the_optimum_of_small_markets_and_never_dearer_than_the_greedy(
    offers: list[Offer], share: float
) -> None:
    target = share * reach(offers)
    chosen = cheapest(offers, target)
    least = min(cost for cost, rate in every_choice(offers) if rate >= target * (1 - 1e-9))
    assert chosen.usd_per_h == pytest.approx(least, rel=1e-6)
    assert chosen.usd_per_h <= greedy(offers, target).usd_per_h * (1 + 1e-9)


@settings(max_examples=150)
@given(markets, st.floats(0.01, 20.0))
def test_a_budget_is_kept_and_buys_the_most_in_small_markets(offers: list[Offer], budget: float) -> None:
    budget = max(budget, min(one.usd_per_h for one in offers))
    chosen = within_budget(offers, budget)
    assert chosen.usd_per_h <= budget * (1 + 1e-8)
    assert all(0 < pick.machines <= pick.offer.count for pick in chosen.picks)
    most = max(rate for cost, rate in every_choice(offers) if cost <= budget * (1 + 1e-9))
    assert chosen.mu_per_s == pytest.approx(most, rel=1e-6)


@settings(max_examples=100)
@given(markets, shares)
def test_what_a_target_costs_buys_that_target(offers: list[Offer], share: float) -> None:
    target = share * reach(offers)
    assert within_budget(offers, cheapest(offers, target).usd_per_h).mu_per_s >= target * (1 - 1e-8)
