from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.plan.draft import Problem, in_order
from echo2.broadcast.plan.fluid import fair_shares, forest_rates, forest_times
from echo2.broadcast.plan.model import SEED, Node


@pytest.mark.parametrize(
    ("capacity", "demands", "shares"),
    [
        (12.0, [10.0, 10.0, 10.0], [4.0, 4.0, 4.0]),
        (12.0, [1.0, 10.0, 10.0], [1.0, 5.5, 5.5]),
        (40.0, [1.0, 10.0, 10.0], [1.0, 10.0, 10.0]),
        (5.0, [], []),
    ],
)
def test_what_one_leaves_the_others_share(capacity: float, demands: list[float], shares: list[float]) -> None:
    assert fair_shares(capacity, demands) == shares


@given(st.floats(0, 1e9), st.lists(st.floats(0, 1e9), max_size=8))
def test_nobody_gets_more_than_it_demands_and_all_together_what_there_is(capacity: float, demands: list[float]) -> None:
    shares = fair_shares(capacity, demands)
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))
    assert sum(shares) == pytest.approx(min(capacity, sum(demands)))


def test_nobody_receives_faster_than_its_parent_and_every_relay_costs_a_chunk_and_the_latency() -> None:
    """By hand, in bytes and seconds: 100 bytes in chunks of 10, latency 1. a: 100/10 + 1. b and c share a's 8, 4 each,
    and begin 10/10 + 1 later. d is fed at 3 and begins another 10/4 + 1 later."""
    nodes = [Node("a", 8.0, 10.0), Node("b", 3.0, 50.0), Node("c", 1.0, 50.0), Node("d", 1.0, 50.0)]
    problem = Problem(in_order(nodes), 30.0, 100, 10, 1.0, 1.0)
    parents = {"a": SEED, "b": "a", "c": "a", "d": "b"}
    rates = forest_rates(problem, parents)
    assert rates == {"a": 10.0, "b": 4.0, "c": 4.0, "d": 3.0}
    assert forest_times(problem, parents, rates) == pytest.approx(
        {"a": 11.0, "b": 2 + 25 + 1, "c": 2 + 25 + 1, "d": 2 + 3.5 + 100 / 3 + 1}
    )
