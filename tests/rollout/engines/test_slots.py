"""Rows in blocks against rows kept one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.rollout.engines.slots import GROWTH, OWN_BLOCK_ROWS, Slots, compacted

LAYERS, HEADS, SIZE = 2, 2, 4


class Plain:
    """The same rows, each with keys and values of its own."""

    def __init__(self) -> None:
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # each [layers, H, L, D]

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        found = []
        for query, (keys, values) in zip(queries, self.rows, strict=True):
            seen = slice(None) if window is None else slice(-window, None)
            known, said = (part[layer][:, seen].repeat_interleave(2, 0) for part in (keys, values))
            weights = torch.softmax(query @ known.transpose(1, 2) * 0.5, -1)
            found.append((weights @ said).transpose(0, 1))
        return torch.stack(found)


def grow(slots: Slots, plain: Plain, window: int | None) -> None:
    """One step with random keys, values and queries; what is found must be the same."""
    rows = len(plain.rows)
    positions = slots.open()
    assert positions.squeeze(1).tolist() == [keys.shape[2] for keys, _ in plain.rows]
    new = [(torch.randn(rows, HEADS, 1, SIZE), torch.randn(rows, HEADS, 1, SIZE)) for _ in range(LAYERS)]
    plain.rows = [
        (
            torch.cat([keys, torch.stack([new[layer][0][row] for layer in range(LAYERS)])], 2),
            torch.cat([values, torch.stack([new[layer][1][row] for layer in range(LAYERS)])], 2),
        )
        for row, (keys, values) in enumerate(plain.rows)
    ]
    for layer in range(LAYERS):
        slots.update(*new[layer], layer)
        queries = torch.randn(rows, 2 * HEADS, 1, SIZE)
        expected = plain.attend(layer, queries, window)
        torch.testing.assert_close(slots.attend(queries, 0.5, window), expected, atol=1e-5, rtol=1e-4)
    slots.close()


def states_of(length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(1, HEADS, length, SIZE), torch.randn(1, HEADS, length, SIZE)) for _ in range(LAYERS)]


def place(slots: Slots, plain: Plain, length: int, copies: int) -> None:
    states = states_of(length)
    whole = (torch.cat([keys for keys, _ in states]), torch.cat([values for _, values in states]))
    rows = plain.rows + [whole] * copies
    plain.rows = [rows[row] for row in slots.place(states, copies)]


@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from([1, 2, 9]), st.randoms()), min_size=1, max_size=6))
def test_rows_that_come_and_go_see_what_is_theirs(story: list) -> None:  # type: ignore[type-arg]
    torch.manual_seed(0)
    slots, plain = Slots(LAYERS, torch.device("cpu")), Plain()
    for length, copies, random in story:
        place(slots, plain, length, copies)
        window = random.choice([None, 5])
        for _ in range(random.randint(1, 3)):
            grow(slots, plain, window)
        gone = [row for row in range(slots.rows) if random.random() < 0.3]
        if gone:
            plain.rows = [plain.rows[row] for row in slots.remove(gone)]
        assert slots.rows == len(plain.rows)
    if plain.rows:
        row = len(plain.rows) - 1
        for layer, (keys, values) in enumerate(slots.states(row)):
            assert torch.equal(keys[0], plain.rows[row][0][layer])
            assert torch.equal(values[0], plain.rows[row][1][layer])


def test_rows_outgrow_their_buffers() -> None:
    slots, plain = Slots(LAYERS, torch.device("cpu")), Plain()
    place(slots, plain, 3, 1)
    place(slots, plain, 5, 1)
    for _ in range(GROWTH + 2):
        grow(slots, plain, None)


def test_rows_that_ended_give_their_memory_back_though_one_goes_on() -> None:
    slots = Slots(LAYERS, torch.device("cpu"))
    slots.place(states_of(10), 1)
    single = slots.nbytes
    slots.remove([0])
    for number in range(6):
        slots.place(states_of(10), 64)
        slots.remove(range(number, number + 63))
    assert (slots.rows, slots.nbytes) == (6, 6 * single)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from([1, 2, 9, 40]), st.randoms()), max_size=5))
def test_free_places_are_no_more_than_the_rows(story: list) -> None:  # type: ignore[type-arg]
    slots = Slots(LAYERS, torch.device("cpu"))
    for length, copies, random in story:
        slots.place(states_of(length), copies)
        for block in slots.blocks:
            assert block._capacity < 2 * block.rows
        slots.remove([row for row in range(slots.rows) if random.random() < 0.6])
        for block in slots.blocks:
            assert block._capacity < 2 * block.rows


def test_a_group_is_a_block_without_a_mask_and_single_rows_of_one_length_share_one() -> None:
    slots, plain = Slots(LAYERS, torch.device("cpu")), Plain()
    place(slots, plain, 10, OWN_BLOCK_ROWS)
    place(slots, plain, 400, 1)
    place(slots, plain, 420, 1)
    place(slots, plain, 30, OWN_BLOCK_ROWS)
    assert [(block.rows, block.mask is None) for block in slots.blocks] == [
        (OWN_BLOCK_ROWS, True),
        (2, False),
        (OWN_BLOCK_ROWS, True),
    ]
    slots.remove(range(OWN_BLOCK_ROWS))
    assert len(slots.blocks) == 2


@given(st.integers(1, 20), st.sets(st.integers(0, 19)))
def test_gaps_are_filled_from_the_end_and_nothing_else_moves(rows: int, gone: set[int]) -> None:
    leaving = [row for row in sorted(gone) if row < rows]
    order = compacted(rows, leaving)
    assert sorted(order) == [row for row in range(rows) if row not in gone]
    assert all(row == place or row >= len(order) for place, row in enumerate(order))
