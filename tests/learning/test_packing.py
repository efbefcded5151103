from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.learning.batch import TrainingRow
from echo2.learning.packing import LONGEST_SHARED_SHEET, MicroBatch, pack


def row(group: int, prompt: list[int], reply: list[int], temperature: float = 1.0) -> TrainingRow:
    tokens = np.asarray(prompt + reply, np.int64)
    loss = np.arange(len(tokens)) >= max(1, len(prompt))
    return TrainingRow(group, tokens, loss, None, float(sum(reply)), temperature, current=True, nucleus=False)


def seen_by_targets(micros: list[MicroBatch]) -> list[tuple[tuple[int, ...], int]]:
    """For each target: the tokens its source sees in order of position, and the target."""
    found = []
    for micro in micros:
        length = micro.tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        for sheet, source, target in zip(
            micro.sheet.tolist(), micro.source.tolist(), micro.target.tolist(), strict=True
        ):
            visible = causal & micro.real[sheet].bool() if micro.visible is None else micro.visible[sheet, 0]
            columns = visible[source].nonzero().flatten()
            positions = micro.positions[sheet, columns]
            assert positions.tolist() == list(range(len(columns)))
            found.append((tuple(micro.tokens[sheet, columns].tolist()), target))
    return sorted(found)


ROWS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(1, 3), min_size=0, max_size=5),
        st.lists(st.integers(1, 9), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=80, deadline=None)
@given(ROWS, st.integers(1, 40), st.booleans())
def test_every_target_sees_exactly_the_tokens_before_it_however_rows_are_packed(
    drawn: list[tuple[int, list[int], list[int]]], budget: int, share: bool
) -> None:
    rows = [row(group, prompt, reply) for group, prompt, reply in drawn]
    expected = sorted((tuple(r.tokens[:i].tolist()), int(r.tokens[i])) for r in rows for i in np.flatnonzero(r.loss))
    assert seen_by_targets(pack(rows, budget=budget, share_prefixes=share)) == expected


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 40), st.booleans())
def test_padded_tokens_stay_within_the_budget_unless_one_row_is_longer(
    drawn: list[tuple[int, list[int], list[int]]], budget: int, share: bool
) -> None:
    rows = [row(group, prompt, reply) for group, prompt, reply in drawn]
    for micro in pack(rows, budget=budget, share_prefixes=share):
        assert micro.tokens.numel() <= budget or (micro.tokens.shape[0] == 1 and micro.visible is None)


def test_a_group_pays_for_its_prompt_once() -> None:
    rows = [row(0, list(range(50)), [60 + i, 61, 62]) for i in range(8)]
    alone = pack(rows, budget=10_000, share_prefixes=False)
    shared = pack(rows, budget=10_000, share_prefixes=True)
    assert sum(m.tokens.numel() for m in alone) == 8 * 53
    assert sum(m.tokens.numel() for m in shared) == 50 + 8 * 3


def test_values_of_a_row_go_to_its_own_targets() -> None:
    rows = [row(0, [1, 2], [5], 0.5), row(0, [1, 2], [6, 7], 2.0)]
    micro = pack(rows, budget=100, share_prefixes=True)[0]
    assert micro.target.tolist() == [5, 6, 7]
    assert micro.temperature.tolist() == [0.5, 2.0, 2.0]
    assert micro.advantages.tolist() == [5.0, 13.0, 13.0]


def test_each_rows_targets_are_neighbours_and_its_group_is_known() -> None:
    rows = [row(4, [1, 2], [5]), row(7, [1], [8, 9, 8]), row(4, [1, 2], [6, 7])]
    for share in (True, False):
        (micro,) = pack(rows, budget=100, share_prefixes=share)
        found = [part.tolist() for part in micro.target.split(micro.lengths.tolist())]
        assert sorted(zip(found, micro.group.tolist(), strict=True)) == [([5], 4), ([6, 7], 4), ([8, 9, 8], 7)]
        assert micro.rows == 3


def test_rows_without_a_target_cost_nothing() -> None:
    silent = TrainingRow(0, np.arange(5), np.zeros(5, np.bool_), None, 1.0, 1.0, current=True, nucleus=False)
    assert pack([silent], budget=100, share_prefixes=True) == []


def test_long_replies_are_not_shared_into_a_sheet_with_a_dense_mask() -> None:
    long = [row(0, [1, 2], [3] * (LONGEST_SHARED_SHEET - 100)) for _ in range(2)]
    micros = pack(long, budget=10 * LONGEST_SHARED_SHEET, share_prefixes=True)
    assert [micro.visible for micro in micros] == [None]


def test_the_longest_come_first() -> None:
    rows = [row(i, [1], [2] * n) for i, n in enumerate([3, 9, 5])]
    micros = pack(rows, budget=10, share_prefixes=True)
    assert [micro.tokens.shape[1] for micro in micros] == [10, 6, 4]


def test_prompts_are_shared_where_that_costs_less() -> None:
    """Eight replies of 100 tokens to a prompt of 50: one sheet of 850 tokens with a dense mask, or eight of 150 each.

    850 + 850²/k against 1200 + 8 · 150²/2k tokens: they cost the same at k = (850² − 4 · 150²)/350 = 1807.
    """
    rows = [row(0, list(range(50)), [60 + i] * 100) for i in range(8)]
    for pairs_per_token, sheets in ((1700.0, 8), (1900.0, 1)):
        (micro,) = pack(rows, budget=10_000, share_prefixes=True, pairs_per_token=pairs_per_token)
        assert micro.tokens.shape[0] == sheets
