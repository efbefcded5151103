from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.provisioning.capacity import Infeasible
from echo2.provisioning.demand import Demand, Times
from echo2.provisioning.offers import Offer
from echo2.provisioning.plan import answer
from echo2.provisioning.question import Afford, Ask, Market, Question, Rent, Use
from echo2.provisioning.ways_out import Way, applied, sentence, ways_out


def ask(
    t_bcast_s: float, t_gen_s: float = 0.0, *, budget: int | None = 3, period: Any = "default", **demand: Any
) -> Ask:
    asked = Times(t_train_s=100.0, t_bcast_s=t_bcast_s, t_gen_s=t_gen_s, rollouts_per_step=128)
    return Ask(demand=Demand(times=asked, **demand), staleness_budget=budget, publish_period=period)


def market(count: int, rate: float = 1.0) -> Market:
    return Market(offers=(Offer(name="w", gpu="G", count=count, usd_per_h=1.0, rollouts_per_s=rate),))


def told(asked: Ask, offered: Market, question: Question) -> str:
    with pytest.raises(Infeasible) as caught:
        answer(asked, offered, question)
    return sentence(caught.value, ways_out(asked, offered, question))


def test_a_publish_that_takes_too_long_names_s_and_kappa_and_t_bcast() -> None:
    # 10/s fill a step in 1.1 * 128 / 10 = 14.08 s. kappa = 3 holds 201 s; S - 3 + 1 steps must hold 201 + 14.08: S = 5.
    # Or 200 - 14.08 = 185.92 s of T_bcast
    assert told(ask(201.0), market(10), Rent()) == (
        "T_bcast must be at most kappa * T_train, got 201 s against 2 * 100 s = 200 s; set S to 5 and kappa to 3, or "
        "bring T_bcast down to 185 s"
    )


def test_an_illegal_kappa_is_answered_with_one_that_works_as_a_whole() -> None:
    """Field report F04 (a): S = 3 would be legal, and 150 + 60 + 14.08 s ask for S - 2 + 1 = 3 steps."""
    assert told(ask(150.0, 60.0, budget=2, period=2), market(10), Rent()) == (
        "2 <= kappa <= S - 1 must hold, got kappa = 2 with S = 2; set S to 4"
    )


def test_kappa_alone_and_s_alone_are_both_told() -> None:
    # kappa = 4 at S = 5 leaves two steps for 180 + 30 + 14.08 s
    assert told(ask(180.0, 30.0, budget=5, period=4), market(10), Rent()).endswith(
        "; set kappa to 3, or set S to 6, or bring T_bcast down to 155 s"
    )


def test_workers_that_are_missing_are_counted() -> None:
    # 1.1 * 1.28 = 1.408/s of machines with 0.1/s: fifteen
    assert told(ask(50.0), market(12, 0.1), Rent()) == (
        "offers must deliver 1.408 trajectories/s together, got 1.2 from 12 machines; add 3 workers like 'w'"
    )


def test_a_pool_of_a_known_rate_is_told_what_it_must_deliver() -> None:
    """Field report F04 (c)."""
    asked = ask(100.0, rule="paper")
    assert told(asked, Market(), Use(2.55)) == (
        "the pool must deliver 2.56 trajectories/s, got 2.55; set S to 4, or bring "
        "T_bcast down to 99.6 s, or have workers for 2.56 trajectories/s"
    )


def test_two_things_change_only_where_one_is_not_enough() -> None:
    # three steps for 250 s, and 1.408/s from 0.5/s
    (way,) = ways_out(ask(250.0), market(5, 0.1), Rent())
    assert (way.publish_period, way.machines) == (3, 10)
    assert str(way) == "set S to 6 and kappa to 3 and add 10 workers like 'w'"


def test_a_budget_that_rents_nothing_says_by_how_much() -> None:
    assert told(ask(50.0), market(3), Afford(0.4)).endswith("; raise the budget by 0.6 USD/h")
    # rounded so that it is enough: 1.57208 − 0.0176317 is 1.5544483
    dear = Market(offers=(Offer(name="w", gpu="G", count=1, usd_per_h=1.57208, rollouts_per_s=1.0),))
    assert told(ask(50.0), dear, Afford(0.0176317)).endswith("; raise the budget by 1.56 USD/h")


def test_an_illegal_kappa_and_a_budget_that_rents_nothing_are_answered_together() -> None:
    both = told(ask(50.0, budget=50, period=1), market(3), Afford(0.4))
    assert both.endswith("; set kappa to 2 and raise the budget by 0.6 USD/h")


def test_a_budget_asks_for_arrival_only() -> None:
    assert told(ask(250.0), market(3), Afford(3.0)).endswith("; set S to 4, or bring T_bcast down to 200 s")


cadences = st.tuples(st.integers(0, 12), st.one_of(st.sampled_from(["auto", "default"]), st.integers(1, 14)))


@settings(max_examples=400, deadline=None)
@given(
    st.floats(0.1, 3000.0), st.floats(0.0, 1000.0), cadences, st.integers(1, 60), st.sampled_from([0.01, 0.0734, 1.0]),
    st.floats(1.0, 2.0), st.sampled_from(["paper", "overlapped"]),
    st.sampled_from([Rent(), Use(), Use(0.5), Use(2.0), Afford(20.0), Afford(0.3)]),
)  # fmt: skip
def test_every_way_that_is_told_works(
    t_bcast_s: float, t_gen_s: float, cadence: tuple[int, Any], count: int, rate: float, gamma: float, rule: str,
    question: Question,
) -> None:  # fmt: skip
    asked = ask(t_bcast_s, t_gen_s, budget=cadence[0], period=cadence[1], rule=rule, gamma=gamma)
    offered = market(count, rate)
    try:
        answer(asked, offered, question)
    except Infeasible:
        ways = ways_out(asked, offered, question)
        assert ways, "there is always a way"
        for way in ways:
            assert way != Way()
            assert str(way)
            answer(*applied(way, asked, offered, question))
        return
    assume(False)


@settings(max_examples=100, deadline=None)
@given(st.floats(1.0, 1e6), st.floats(0.0, 1e6), st.integers(1, 5), st.sampled_from(["paper", "overlapped"]))
def test_far_beyond_reason_nothing_is_told_that_fails(t_bcast_s: float, t_gen_s: float, count: int, rule: str) -> None:
    asked, offered = ask(t_bcast_s, t_gen_s, rule=rule), market(count, 1e-3)
    for way in ways_out(asked, offered, Rent()):
        try:
            answer(*applied(way, asked, offered, Rent()))
        except UserError as error:
            raise AssertionError(f"{way}: {error}") from error
