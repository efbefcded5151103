from __future__ import annotations

import pytest

from echo2.broadcast.director.late import Candidate, best_parent
from echo2.broadcast.plan.model import SEED, Node

MB = 1e6
COMER = Node("new", 10 * MB, 10 * MB)


def candidate(node_id: str, rate_mb: float, children: int = 0, whole: bool = True) -> Candidate:
    return Candidate(node_id, rate_mb * MB, children, whole)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([candidate(SEED, 100), candidate("a", 10)], "a"),
        ([candidate(SEED, 100), candidate("a", 9)], "a"),
        ([candidate(SEED, 100), candidate("a", 2)], SEED),
        ([candidate(SEED, 1, 9), candidate("a", 2)], "a"),
        ([candidate(SEED, 10), candidate("a", 10, 1), candidate("b", 10, whole=False)], "b"),
        ([candidate(SEED, 10), candidate("a", 10, whole=False), candidate("b", 10)], "b"),
        ([candidate(SEED, 10), candidate("a", 9), candidate("b", 9.5)], "b"),
        ([candidate(SEED, 10), candidate("b", 50), candidate("a", 20)], "a"),
        ([candidate(SEED, 10)], SEED),
    ],
)
def test_a_late_comer_is_fed_by_an_idle_peer_that_is_nearly_as_fast_as_any(
    candidates: list[Candidate], chosen: str
) -> None:
    assert best_parent(COMER, candidates).node_id == chosen
