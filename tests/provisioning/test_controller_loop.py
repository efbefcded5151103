"""The controller with a market in virtual time: deliveries are counted, rates are estimated, machines take a minute.

How convergence is counted: from the first look at which the estimates show the change, the third look orders (or
releases) all that is needed; ordered machines work after their boot. A change of the estimates themselves takes as many
deliveries as ``rates`` says.
"""

from __future__ import annotations

import pytest
from closed_loop import ClosedLoop, Seller, offer, rules
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.provisioning.controller import State
from echo2.provisioning.decisions import Activate, End, Keep, Release
from echo2.provisioning.observation import Phase

TARGET = 1.1
HOUR = 60
"""Decision periods."""


def market(count: int = 12) -> list[Seller]:
    return [
        Seller(offer("small", 0.20, 0.10, count)),
        Seller(offer("middle", 0.50, 0.22, count)),
        Seller(offer("large", 1.60, 0.50, count)),
    ]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("regularity", [1.0, 4.0, 16.0])
def test_it_settles_above_mu_min_and_then_leaves_well_alone(regularity: float, seed: int) -> None:
    """Nothing changes: after an hour of settling, at most two actions in each further hour, one on average."""
    loop = ClosedLoop(rules(), market(), regularity=regularity, seed=seed)
    loop.run(HOUR)
    begun_s, per_hour = loop.now_s, []
    for _ in range(4):
        before_s = loop.now_s
        loop.run(HOUR)
        per_hour.append(len(loop.actions(before_s)))
        assert loop.true_per_s >= TARGET / 1.1
    assert max(per_hour) <= 2
    assert len(loop.actions(begun_s)) <= 4
    assert loop.true_per_s <= 1.5 * TARGET
    assert loop.released_below == []


@pytest.mark.parametrize("seed", range(2))
def test_few_slow_workers_are_held_steady_too(seed: int) -> None:
    """Six workers that bring a group every six or seven minutes each, looked at every minute."""
    by = rules(rollouts_per_step=12, gamma=1.1)  # 0.12/s: a group of 8 every 67 s from all of them
    loop = ClosedLoop(by, [Seller(offer("slow", 0.3, 0.022, 30))], seed=seed, regularity=4.0)
    loop.run(2 * HOUR)
    begun_s = loop.now_s
    loop.run(5 * HOUR)
    assert len(loop.actions(begun_s)) <= 5
    assert 0.9 * 0.12 <= loop.true_per_s <= 1.5 * 0.132


@settings(max_examples=25, deadline=None)
@given(st.floats(40.0, 250.0), st.floats(40.0, 250.0))
def test_it_is_back_at_the_target_three_looks_after_a_step_change_and_a_boot(before_s: float, after_s: float) -> None:
    """The requirement changes at once and by any factor; rates are known. One look more for the machines' boot."""
    loop = ClosedLoop(rules(), market(30), exact=True, t_train_s=before_s)
    loop.run(30)
    loop.t_train_s = after_s
    target = 110 / after_s
    loop.run(3)
    planned = sum(m.true_per_s for m in loop.of(Phase.ACTIVE, Phase.STARTING))
    assert planned >= target * (1 - 1e-9)
    loop.run(1)
    assert loop.true_per_s >= target * (1 - 1e-9)
    excess = [m for m in loop.of(Phase.ACTIVE) if loop.true_per_s - m.true_per_s >= 1.05 * target * (1 + 1e-9)]
    assert excess == [], "and nothing is kept that could go"
    assert loop.released_below == []


@pytest.mark.parametrize("seed", range(4))
def test_half_of_the_pool_slowed_to_a_third_is_made_up_for(seed: int) -> None:
    """A period expects 7 groups or more of each worker, so the estimates show it within two; three more to act, one to
    boot."""
    loop = ClosedLoop(rules(), [Seller(offer("w", 1.0, 1.2 * 0.9, 40))], t_train_s=20.0, regularity=4.0, seed=seed)
    loop.run(30)
    working = sorted(loop.of(Phase.ACTIVE), key=lambda machine: machine.machine_id)
    for machine in working[: len(working) // 2]:
        loop.slow(machine.machine_id, 1 / 3)
    loop.run(7)
    assert loop.true_per_s >= 5.5 / 1.1
    loop.run(15)
    assert loop.true_per_s >= 0.97 * 5.5


def test_workers_that_claim_more_than_they_bring_are_found_out_and_dismissed() -> None:
    """mu_i is what reached the buffer: a seller that states ten times what its machines do loses to an honest one."""
    loop = ClosedLoop(
        rules(), [Seller(offer("liar", 0.5, 0.6), delivers=0.06), Seller(offer("honest", 0.7, 0.3))], seed=3
    )
    loop.run(4 * HOUR)
    assert loop.count("liar") == 0
    assert loop.true_per_s >= TARGET * 0.95
    assert loop.released_below == []


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.2, 6.0), st.floats(0.0, 1.0), st.floats(0.0, 4.0), st.lists(st.integers(1, 200), max_size=6),
    st.floats(30.0, 300.0),
)  # fmt: skip
def test_the_budget_is_never_exceeded(
    budget_usd: float, min_rental_h: float, learner_usd_per_h: float, kills: list[int], t_train_s: float
) -> None:
    """Ending takes all the time that it may; minimum rentals are paid in full."""
    by = rules(budget_usd=budget_usd)
    sellers = [
        Seller(offer("small", 0.20, 0.10, 9, min_rental_h=min_rental_h)),
        Seller(offer("large", 1.60, 0.50, 9)),
    ]
    loop = ClosedLoop(by, sellers, learner_usd_per_h=learner_usd_per_h, t_train_s=t_train_s)
    for period in range(HOUR * 3):
        loop.run(1)
        if period in kills and loop.of(Phase.ACTIVE):
            loop.kill(loop.of(Phase.ACTIVE)[0].machine_id)
        if loop.ended_s is not None and loop.now_s > loop.ended_s + by.end_s + by.period_s:
            break
    smallest_usd = learner_usd_per_h * (by.end_s + 2 * by.period_s) / 3600
    assert loop.ledger.total_usd(loop.now_s) <= max(budget_usd, smallest_usd) * (1 + 1e-9)
    ends = [decision for decision in loop.actions() if isinstance(decision, End)]
    assert len(ends) <= 1
    if ends:
        assert "ending in order within 360 s" in ends[0].reason
        assert not any(isinstance(d, Activate) and at > loop.ended_s for at, d in loop.decided)


def test_a_price_that_rises_makes_way_for_another_offer() -> None:
    first, second = Seller(offer("first", 0.5, 0.3)), Seller(offer("second", 0.6, 0.3))
    loop = ClosedLoop(rules(), [first, second], exact=True)
    loop.run(20)
    assert (loop.count("first"), loop.count("second")) == (4, 0)
    first.usd_per_h = 2.0
    for machine in loop.of(Phase.ACTIVE):
        machine.usd_per_h = 2.0
    loop.run(2 * HOUR)
    assert (loop.count("first"), loop.count("second")) == (0, 4)
    assert loop.released_below == []


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.tuples(st.integers(30, 200), st.integers(0, 9)), max_size=8))
def test_whatever_dies_nothing_is_ever_released_below_the_target(seed: int, deaths: list[tuple[int, int]]) -> None:
    loop = ClosedLoop(rules(), market(), seed=seed)
    due = dict(deaths)
    for period in range(240):
        loop.run(1)
        working = sorted(loop.of(Phase.ACTIVE), key=lambda machine: machine.machine_id)
        if period in due and working:
            loop.kill(working[due[period] % len(working)].machine_id)
    assert loop.released_below == []
    assert loop.true_per_s >= TARGET / 1.1
    assert all(decision.reason for _, decision in loop.decided)
    assert sum(isinstance(d, Release) for d in loop.actions()) <= len(deaths) + 6


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(
        st.tuples(st.sampled_from(["die", "slow", "mute", "price", "none", "need", "bcast", "forget", "fail"]),
                  st.integers(1, 15), st.integers(0, 99)),
        min_size=1, max_size=12,
    ),
    st.sampled_from(["cheapest", "random"]),
)  # fmt: skip
def test_whatever_happens_it_neither_breaks_nor_orders_too_much(
    seed: int, story: list[tuple[str, int, int]], policy: str
) -> None:
    """Also a controller that lost its memory, prices that vanish, and a T_bcast that no pool can make good."""
    loop = ClosedLoop(rules(policy=policy), market(6), seed=seed)
    for what, periods, number in story:
        working = sorted(loop.of(Phase.ACTIVE), key=lambda machine: machine.machine_id)
        machine = working[number % len(working)] if working else None
        seller = list(loop.sellers.values())[number % 3]
        if what == "need":
            loop.t_train_s = 30.0 + 4 * number
        elif what == "bcast":
            loop.t_bcast_s = None if number % 3 == 0 else 8.0 * number
        elif what == "price":
            seller.usd_per_h = 0.01 + number / 50
        elif what == "none":
            seller.usd_per_h = None
        elif what == "fail":
            seller.fails = number % 5
        elif what == "forget":
            loop.state = State()
        elif machine is not None and what == "die":
            loop.kill(machine.machine_id)
        elif machine is not None and what == "slow":
            loop.slow(machine.machine_id, number / 100)
        elif machine is not None:
            machine.heard = not machine.heard
        loop.run(periods)
        for name in loop.sellers:
            assert loop.count(name) <= 6
        assert loop.decided[-1][0] == loop.now_s


def test_every_period_is_accounted_for_in_words() -> None:
    loop = ClosedLoop(rules(), market())
    loop.run(30)
    assert {at_s for at_s, _ in loop.decided} == {60.0 * number for number in range(1, 31)}
    kept = [decision.reason for _, decision in loop.decided if isinstance(decision, Keep)]
    assert all("the target is 1.1 x 1 = 1.1 trajectories/s" in reason for reason in kept)
