from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echo2.learning.batch import TrainingRow
from echo2.learning.ranks import rows_of
from echo2.learning.shares import share_of


def row(group: int, length: int, *, silent: bool = False) -> TrainingRow:
    loss = np.arange(length) > (length if silent else 0)
    return TrainingRow(group, np.zeros(length, np.int64), loss, None, 0.0, 1.0, current=True, nucleus=False)


ROWS = st.lists(st.builds(row, st.integers(0, 4), st.integers(2, 50), silent=st.booleans()), max_size=20)


@given(ROWS, st.integers(1, 6))
def test_every_row_with_loss_is_in_exactly_one_share(rows: list[TrainingRow], world: int) -> None:
    shares = [share_of(rows, rank, world) for rank in range(world)]
    dealt = [id(found) for share in shares for found in share if found.loss.any()]
    assert sorted(dealt) == sorted(id(found) for found in rows if found.loss.any())


@given(ROWS, st.integers(2, 6))
def test_no_share_is_longer_than_an_even_one_and_the_longest_piece(rows: list[TrainingRow], world: int) -> None:
    total = sum(len(found.tokens) for found in rows if found.loss.any())
    longest = max((len(found.tokens) for found in rows), default=0)
    for rank in range(world):
        share = sum(len(found.tokens) for found in share_of(rows, rank, world))
        assert share <= total / world + max(longest, total / world)


def test_a_group_stays_together_where_every_rank_has_work_without_cutting_it() -> None:
    rows = [row(group, 10) for group in range(4) for _ in range(3)]
    for rank in range(2):
        groups = [found.group for found in share_of(rows, rank, 2)]
        assert all(groups.count(group) == 3 for group in set(groups))
    assert {len(share_of(rows[:3], rank, 3)) for rank in range(3)} == {1}, "one group alone is cut"


@given(st.integers(1, 9), st.integers(0, 50))
def test_ranks_hold_all_rows_of_a_tensor_in_order(world: int, count: int) -> None:
    spans = [rows_of(rank, world, count) for rank in range(world)]
    assert [index for span in spans for index in range(*span)] == list(range(count))
