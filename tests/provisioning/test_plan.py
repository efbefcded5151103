from __future__ import annotations

import math
import time
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.provisioning.capacity import Infeasible
from echo2.provisioning.demand import Cadence, Demand, Times, step_period_s
from echo2.provisioning.offers import Offer
from echo2.provisioning.plan import answer, survey
from echo2.provisioning.question import Afford, Ask, Market, Rent, Use

PAPER = Times(t_train_s=1631.2, t_bcast_s=1310.0, rollouts_per_step=2048)
OFFERS = (
    Offer(name="5090", gpu="RTX5090", count=10, usd_per_h=0.51, rollouts_per_s=0.20),  # rho 2.55
    Offer(name="4090", gpu="RTX4090", count=40, usd_per_h=0.40, rollouts_per_s=0.10),  # rho 4.00
)
MARKET = Market(offers=OFFERS)


def ask(times: Times = PAPER, *, budget: int | None = 3, period: Any = "default", **demand: Any) -> Ask:
    return Ask(demand=Demand(times=times, **demand), staleness_budget=budget, publish_period=period)


def times(t_bcast_s: float, t_gen_s: float = 0.0) -> Times:
    return Times(t_train_s=10.0, t_bcast_s=t_bcast_s, t_gen_s=t_gen_s, rollouts_per_step=90)


def pool(count: int, **changes: Any) -> Market:
    given = {"name": "w", "gpu": "G", "count": count, "usd_per_h": 1.0, "rollouts_per_s": 1.0}
    return Market(offers=(Offer(**{**given, **changes}),))


def test_the_papers_own_case_under_both_rules() -> None:
    # (2): 4096 / 1952.4 = 2.0979, times 1.1: 2.3077, ten of the first and four of the second for 6.70 USD/h.
    # (2'): 2 * 1631.2 - 1310 = 1952.4 leaves all of T_train: 2048 / 1631.2 = 1.2555, times 1.1: 1.3811, seven for 3.57
    paper = answer(ask(rule="paper"), MARKET, Rent())
    ours = answer(ask(), MARKET, Rent())
    for plan in (paper, ours):
        assert plan.cadence == (3, 2)
        assert plan.mu_min_per_s == pytest.approx(2.0979, abs=1e-4)
        assert plan.mu_min_overlapped_per_s == pytest.approx(1.2555, abs=1e-4)
        assert (plan.step_s, plan.bubble_ratio) == (1631.2, 0.0)
    assert paper.mu_target_per_s == pytest.approx(2.3077, abs=1e-4)
    assert ours.mu_target_per_s == pytest.approx(1.3811, abs=1e-4)
    assert (paper.workers_usd_per_h, ours.workers_usd_per_h) == (pytest.approx(6.70), pytest.approx(3.57))
    # 3.57 USD/h and 5 for the learner over 1631.2 s
    assert ours.usd_per_step(5.0) == pytest.approx(8.57 * 1631.2 / 3600)


def test_a_tenth_of_t_bcast_saves_what_the_paper_charges_for_it_and_nothing_under_overlap() -> None:
    # (2) at 131 s: 4096 / 3131.4 = 1.3080, times 1.1: 1.4388, seven of the first and one of the second for 3.97 USD/h
    # instead of 6.70
    asked = ask(rule="paper")
    assert answer(asked.with_t_bcast(131.0), MARKET, Rent()).workers_usd_per_h == pytest.approx(3.97)
    assert answer(ask().with_t_bcast(131.0), MARKET, Rent()).workers_usd_per_h == pytest.approx(3.57)


def test_auto_takes_the_smallest_kappa_among_equally_cheap_ones() -> None:
    # S = 6, T_bcast = 0.8 T_train, T_gen = 0.3 T_train (DESIGN section 2): 10/s at kappa = 5, 9/s from 4 down
    asked = ask(times(8.0, 3.0), budget=6, gamma=1.0)
    assert answer(asked, pool(20), Rent()).workers_usd_per_h == pytest.approx(10.0)  # S - 1
    automatic = answer(ask(times(8.0, 3.0), budget=6, gamma=1.0, period="auto"), pool(20), Rent())
    assert (automatic.cadence, automatic.workers_usd_per_h) == ((6, 2), pytest.approx(9.0))


def test_auto_pays_for_traffic_with_fewer_publishes_while_that_is_cheaper() -> None:
    # 1 GB a publish at 1 USD/GB: 3600 / (10 kappa) GB/h a worker. kappa = 4: 9 * (1 + 90) = 819 USD/h; kappa = 5 needs
    # ten workers: 10 * (1 + 72) = 730
    market = Market(offers=pool(20, traffic_usd_per_gb=1.0).offers, bytes_per_publish=1e9)
    automatic = answer(ask(times(8.0, 3.0), budget=6, gamma=1.0, period="auto"), market, Rent())
    assert (automatic.cadence.publish_period, automatic.workers_usd_per_h) == (5, pytest.approx(730.0))


def test_auto_lets_a_publish_arrive_before_the_next_one_begins() -> None:
    # T_bcast = 2.5 T_train: kappa = 2 would be enough for (2') at S = 6, but publishes would queue up
    assert answer(ask(times(25.0), budget=6, period="auto"), pool(20), Rent()).cadence == (6, 3)
    with pytest.raises(
        Infeasible, match=r"T_bcast must be at most kappa \* T_train, got 25 s against 2 \* 10 s = 20 s"
    ):
        answer(ask(times(25.0), budget=6, period=2), pool(20), Rent())


@pytest.mark.parametrize(("budget", "period"), [(2, 2), (3, 1), (3, 3), (2, "auto"), (0, "default"), (2, "default")])
def test_a_cadence_that_the_mode_refuses_is_infeasible(budget: int, period: Any) -> None:
    """Field report F04 (a) and (d)."""
    for question in (Rent(), Afford(5.0), Use(50.0), Use()):
        with pytest.raises(Infeasible, match=r"2 <= kappa <= S - 1 must hold, got kappa = \d+ with S = "):
            answer(ask(times(5.0), budget=budget, period=period), pool(20), question)


@pytest.mark.parametrize("t_bcast_s", [200.0, 201.0])
@pytest.mark.parametrize("rule", ["paper", "overlapped"])
def test_a_dissemination_as_long_as_the_period_is_refused_under_both_rules(t_bcast_s: float, rule: str) -> None:
    """Field report F04 (b)."""
    asked = Times(t_train_s=100.0, t_bcast_s=t_bcast_s, rollouts_per_step=128)
    with pytest.raises(Infeasible, match="got"):
        answer(ask(asked, rule=rule), pool(10**6), Rent())


def test_workers_just_short_of_the_requirement_are_infeasible_and_just_enough_are_feasible() -> None:
    """Field report F04 (c): 2 * 128 / (200 - 100) = 2.56 by (2), before the safety factor."""
    asked = ask(Times(t_train_s=100.0, t_bcast_s=100.0, rollouts_per_step=128), rule="paper", gamma=1.0)
    for question in (Rent(), Use()):
        assert answer(asked, pool(1, rollouts_per_s=2.56), question).mu_selected_per_s == 2.56
        with pytest.raises(Infeasible, match=r"must deliver 2.56 trajectories/s.*got 2.55"):
            answer(asked, pool(1, rollouts_per_s=2.55), question)


def test_a_budget_buys_the_shortest_step_and_no_more_than_saturation() -> None:
    # 2.04 USD/h: four of the first deliver 0.8/s, 2048 / 0.8 = 2560 s a step; 100 USD/h buy what Rent buys
    short = answer(ask(), MARKET, Afford(2.04))
    assert (short.step_s, short.bubble_ratio) == (pytest.approx(2560.0), pytest.approx(1 - 1631.2 / 2560))
    assert not short.is_enough
    assert answer(ask(), MARKET, Afford(100.0)) == answer(ask(), MARKET, Rent())
    with pytest.raises(Infeasible, match=r"raise it by 0\.1 USD/h"):
        answer(ask(), MARKET, Afford(0.3))


def test_a_budget_is_answered_where_no_pool_could_saturate() -> None:
    # S = 3, kappa = 2: T_bcast + T_gen = 22 s exceed two steps; 90/s fill a step in 1 s: (10 + 22 + 1 - 30) / 4 more
    plan = answer(ask(times(12.0, 10.0)), pool(90), Afford(90.0))
    assert plan.mu_target_per_s is None
    assert plan.step_s == pytest.approx(10.75)


def test_a_pool_is_surveyed_and_the_smallest_bubble_at_the_smallest_s_wins() -> None:
    asked = ask(times(8.0, 3.0), budget=None, period="auto")
    plans = survey(asked, Market(), Use(9.0))
    assert [plan.cadence for plan in plans[:3]] == [(3, 2), (4, 2), (4, 3)]
    assert len(plans) == sum(range(1, 10))
    assert answer(asked, Market(), Use(9.0)).cadence == (4, 2)  # at (3, 2) 9 s a step are left for 10 s of work
    assert answer(asked, Market(), Use(10.0)).cadence == (3, 2)


def test_a_pool_that_is_too_small_is_told_with_its_bubble() -> None:
    with pytest.raises(Infeasible, match=r"must deliver 9 trajectories/s, got 6, .* waits 33.3% of the time"):
        answer(ask(times(8.0)), Market(), Use(6.0))


def test_the_whole_market_is_taken_with_its_downtime() -> None:
    plan = answer(ask(times(8.0)), pool(12, reliability=0.9), Use())
    assert (plan.mu_selected_per_s, plan.workers_usd_per_h) == (pytest.approx(10.8), pytest.approx(12.0))


@pytest.mark.parametrize("gamma", [0.9, math.nan, math.inf])
def test_a_gamma_that_is_none_is_refused(gamma: float) -> None:
    with pytest.raises(UserError, match="gamma must be"):
        ask(gamma=gamma)


def test_an_s_beyond_all_use_is_refused() -> None:
    with pytest.raises(UserError, match="S must be at most 1000 steps, got 1001"):
        ask(budget=1001)


@settings(max_examples=80, deadline=None)
@given(
    st.floats(0.01, 30.0), st.floats(0.0, 20.0), st.integers(3, 9), st.floats(1.0, 2.0),
    st.sampled_from(["paper", "overlapped"]), st.sampled_from(["auto", "default"]),
)  # fmt: skip
def test_what_is_rented_keeps_the_learner_busy(
    t_bcast_s: float, t_gen_s: float, budget: int, gamma: float, rule: str, period: str
) -> None:
    asked = ask(times(t_bcast_s, t_gen_s), budget=budget, period=period, gamma=gamma, rule=rule)
    try:
        plan = answer(asked, pool(10**6), Rent())
    except Infeasible:
        return
    assert 2 <= plan.cadence.publish_period <= budget - 1
    assert plan.mu_target_per_s is not None
    assert plan.mu_selected_per_s >= plan.mu_target_per_s * (1 - 1e-8)
    assert plan.is_enough
    assert plan.step_s >= 10.0
    if rule == "overlapped":
        assert plan.bubble_ratio == 0.0
    fixed = ask(times(t_bcast_s, t_gen_s), budget=budget, period=plan.cadence.publish_period, gamma=gamma, rule=rule)
    assert answer(fixed, pool(10**6), Rent()) == plan


@settings(max_examples=80, deadline=None)
@given(st.floats(0.01, 20.0), st.floats(0.0, 20.0), st.integers(2, 8), st.integers(1, 8), st.floats(1.0, 200.0))
def test_more_workers_never_make_a_longer_step(
    t_bcast_s: float, t_gen_s: float, period: int, more: int, rate: float
) -> None:
    asked, cadence = times(t_bcast_s, t_gen_s), Cadence(period + more, period)
    assert step_period_s(asked, cadence, rate * 1.1) <= step_period_s(asked, cadence, rate) * (1 + 1e-9)
    assert step_period_s(asked, cadence, rate) >= max(10.0, 90 / rate) * (1 - 1e-9)


def test_a_plan_from_ten_thousand_offers_is_made_at_once() -> None:
    """50 ms are promised for the choice; a test machine may be busy: processor time, the best of several, with room."""
    draw = Random(3)
    offers = tuple(
        Offer(
            name=f"o{k}",
            gpu="G",
            count=draw.randint(1, 9),
            usd_per_h=draw.uniform(0.2, 5),
            rollouts_per_s=draw.uniform(0.05, 1),
        )
        for k in range(10_000)
    )
    market, fastest = Market(offers=offers), math.inf
    for _ in range(5):
        began = time.process_time()
        answer(ask(budget=11, period="auto"), market, Rent())
        fastest = min(fastest, time.process_time() - began)
    assert fastest < 0.4, fastest


def test_too_few_machines_are_the_reason_where_a_kappa_would_do() -> None:
    # kappa = 5 has no answer at all, kappa = 2 only too few machines
    with pytest.raises(Infeasible, match=r"offers must deliver 9\.9 trajectories/s together, got 5"):
        answer(ask(times(15.0, 6.0), budget=6, period="auto"), pool(5), Rent())
