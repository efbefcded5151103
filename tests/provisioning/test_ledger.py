from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.provisioning.ledger import Ledger


def test_cost_is_price_times_time_over_all_rentals() -> None:
    ledger = Ledger().rent("learner", 20.0, 0.0).rent("w1", 0.5, 1800.0)
    assert ledger.usd_per_h == 20.5
    assert ledger.total_usd(3600.0) == pytest.approx(20.25)
    assert ledger.by_name_usd(3600.0) == {"learner": pytest.approx(20.0), "w1": pytest.approx(0.25)}


def test_a_released_machine_costs_no_more() -> None:
    ledger = Ledger().rent("w1", 1.0, 0.0).release("w1", 1800.0).release("never-rented", 1800.0)
    assert (ledger.total_usd(7200.0), ledger.usd_per_h) == (0.5, 0.0)


def test_a_change_of_price_settles_what_was_due() -> None:
    ledger = Ledger().rent("w1", 1.0, 0.0).rent("w1", 3.0, 3600.0)
    assert ledger.total_usd(7200.0) == pytest.approx(4.0)


def test_a_restart_keeps_what_was_spent() -> None:
    assert Ledger(settled_usd=7.5).rent("w1", 2.0, 50.0).total_usd(50.0 + 1800.0) == 8.5


def test_a_machine_released_early_is_billed_to_its_minimum_at_once() -> None:
    ledger = Ledger().rent("w1", 2.0, 0.0, min_rental_s=3600.0)
    assert ledger.total_usd(600.0) == pytest.approx(2.0 / 6)
    assert ledger.release("w1", 600.0).total_usd(600.0) == pytest.approx(2.0)
    assert ledger.release("w1", 7200.0).total_usd(7200.0) == pytest.approx(4.0)


def test_a_preempted_machine_costs_nothing_from_that_moment() -> None:
    ledger = Ledger().rent("w1", 2.0, 0.0, min_rental_s=3600.0).lose("w1", 600.0).lose("w1", 900.0)
    assert ledger.total_usd(7200.0) == pytest.approx(2.0 / 6)


def test_a_new_price_does_not_prolong_the_minimum() -> None:
    ledger = Ledger().rent("w1", 1.0, 0.0, min_rental_s=3600.0).rent("w1", 3.0, 1800.0, min_rental_s=3600.0)
    assert ledger.release("w1", 1900.0).total_usd(1900.0) == pytest.approx(0.5 + 1.5)


def test_a_step_is_charged_what_was_spent_since_the_one_before() -> None:
    ledger = Ledger(settled_usd=5.0, told_usd=5.0).rent("w1", 3.6, 0.0)
    ledger, first_usd = ledger.step(100.0)
    ledger, again_usd = ledger.step(100.0)
    ledger, second_usd = ledger.release("w1", 250.0).step(400.0)
    assert (first_usd, again_usd, second_usd) == (pytest.approx(0.1), 0.0, pytest.approx(0.15))
    assert ledger.total_usd(400.0) == pytest.approx(5.25)


@pytest.mark.parametrize("usd_per_h", [-0.1, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(usd_per_h: float) -> None:
    with pytest.raises(UserError, match="price of w1"):
        Ledger().rent("w1", usd_per_h, 0.0)


moves = st.lists(
    st.tuples(
        st.floats(0, 5000),
        st.sampled_from(["rent", "release", "lose", "look", "step"]),
        st.sampled_from("abc"),
        st.integers(0, 50),
        st.sampled_from([0.0, 3600.0]),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(moves)
def test_the_total_is_the_integral_of_the_prices_never_falls_and_does_not_mind_being_looked_at(
    history: list[tuple[float, str, str, int, float]],
) -> None:
    looked, plain, now_s, before_usd, steps_usd = Ledger(), Ledger(), 0.0, 0.0, 0.0
    prices: dict[str, tuple[float, float]] = {}  # name: (price, end of the minimum)
    integral_usd = 0.0
    for gap_s, move, name, usd_per_h, min_s in history:
        now_s += gap_s
        integral_usd += sum(price * gap_s / 3600 for price, _ in prices.values())
        if move == "rent":
            prices[name] = (float(usd_per_h), prices[name][1] if name in prices else now_s + min_s)
            looked, plain = (ledger.rent(name, usd_per_h, now_s, min_s) for ledger in (looked, plain))
        elif move == "release":
            price, until_s = prices.pop(name, (0.0, 0.0))
            integral_usd += price * max(0.0, until_s - now_s) / 3600
            looked, plain = (ledger.release(name, now_s) for ledger in (looked, plain))
        elif move == "lose":
            prices.pop(name, None)
            looked, plain = (ledger.lose(name, now_s) for ledger in (looked, plain))
        looked, usd = looked.step(now_s)
        steps_usd += usd
        total_usd = looked.total_usd(now_s)
        assert total_usd >= before_usd - 1e-9
        before_usd = total_usd
    assert before_usd == pytest.approx(integral_usd)
    assert plain.total_usd(now_s) == pytest.approx(before_usd) == pytest.approx(steps_usd)
    assert sum(plain.by_name_usd(now_s).values()) == pytest.approx(before_usd)
