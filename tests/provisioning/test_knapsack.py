from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.provisioning.knapsack import cover, improving_range, pack

Items = list[tuple[float, float, int]]


def arrays(items: Items) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    items = sorted(items, key=lambda item: item[0] / item[1])
    costs, rates, counts = zip(*items, strict=True)
    return np.array(costs), np.array(rates), np.array(counts)


items = st.lists(
    st.tuples(st.integers(1, 60).map(lambda n: n / 50), st.integers(1, 60).map(lambda n: n / 50), st.integers(1, 3)),
    min_size=1,
    max_size=5,
)


def test_units_that_fit_exactly_are_found() -> None:
    # 0.7 + 0.3 for 1.05 against two of 0.5 for 1.2 or the greedy's 0.7 + 0.5 for 1.3
    costs, rates, counts = arrays([(0.7, 0.7, 1), (0.6, 0.5, 2), (0.35, 0.3, 1)])
    assert (np.array(cover(costs, rates, counts)) @ costs) == pytest.approx(1.05)


def test_a_budget_that_is_used_up_exactly_is_found() -> None:
    # 0.6 + 0.4 brings 1.6; the greedy's 0.7 alone brings 1.2
    costs, rates, counts = arrays([(0.7, 1.2, 1), (0.6, 0.96, 1), (0.4, 0.64, 1)])
    assert (np.array(pack(costs, rates, counts)) @ rates) == pytest.approx(1.6)


@given(items)
def test_no_choice_outside_the_improving_range_is_better(drawn: Items) -> None:
    costs, rates, counts = arrays(drawn)
    rates = rates / (rates @ counts) * 1.5
    choices = [np.array(units) for units in product(*(range(count + 1) for count in counts))]
    covering = [units for units in choices if units @ rates >= 1]
    known = sorted(float(units @ costs) for units in covering)[len(covering) // 2]
    least, most = improving_range(costs, rates, counts, known)
    for units in covering:
        if units @ costs < known * (1 - 1e-9):
            assert (least <= units).all() and (units <= most).all()


@given(items)
def test_no_choice_outside_the_improving_range_has_more_rate(drawn: Items) -> None:
    costs, rates, counts = arrays(drawn)
    choices = [np.array(units) for units in product(*(range(count + 1) for count in counts))]
    affordable = [units for units in choices if units @ costs <= 1]
    known = sorted(float(units @ rates) for units in affordable)[len(affordable) // 2]
    least, most = improving_range(-rates, costs, counts, -known)
    for units in affordable:
        if units @ rates > known * (1 + 1e-9):
            assert (least <= units).all() and (units <= most).all()
