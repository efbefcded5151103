from __future__ import annotations

import pytest

from echo2.broadcast.plan.bound import lower_bound_s, quick_count
from echo2.broadcast.plan.model import Node

MB = 10**6


def fleet(count: int, up: float, down: float) -> list[Node]:
    return [Node(f"w{k}", up * MB, down * MB) for k in range(count)]


@pytest.mark.parametrize(
    ("uplink", "count", "up", "down", "bound_s"),
    [
        (100, 8, 10, 10, 10.0),  # G/d: 100 MB at 10 MB/s
        (5, 8, 10, 10, 20.0),  # G/B_0
        (40, 8, 0, 10, 20.0),  # 8·G / 40: nobody sends
        (40, 8, 5, 50, 10.0),  # 8·G / (40 + 8·5)
    ],
)
def test_each_of_the_three_limits_can_be_the_one(
    uplink: float, count: int, up: float, down: float, bound_s: float
) -> None:
    assert lower_bound_s(100 * MB, uplink * MB, fleet(count, up, down)) == pytest.approx(bound_s)


def test_the_bound_of_a_share_forgets_the_slowest() -> None:
    nodes = [*fleet(9, 10, 10), Node("slow", 1 * MB, 1 * MB)]
    assert lower_bound_s(100 * MB, 100 * MB, nodes) == pytest.approx(100.0)
    assert lower_bound_s(100 * MB, 100 * MB, nodes, 0.9) == pytest.approx(10.0)


@pytest.mark.parametrize(("nodes", "share", "count"), [(16, 1 / 1.1, 15), (10, 0.9, 9), (1, 0.1, 1), (0, 1.0, 0)])
def test_a_share_of_nodes_is_rounded_up(nodes: int, share: float, count: int) -> None:
    assert quick_count(nodes, share) == count


def test_without_nodes_nothing_takes_time() -> None:
    assert lower_bound_s(100 * MB, 1.0, []) == 0.0
