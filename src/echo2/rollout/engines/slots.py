"""Keys and values of many growing rows, without copying them while they grow.

Invariant: a row of a block holds its tokens in columns ``[start, head)``; what lies left of them is hidden by a mask
and is always a number. Rows of a block end at the same column, so a step writes one column for all of them. The batch's
rows are those of the first block, then those of the second, and so on. A block has places for at most twice its rows:
what ended gives its memory back, however long one of its neighbours goes on.

    block   0 …… low ……… head ……… width        A group that began together is a block by itself: its rows are equally
    row 0          tokens │ free                long and need no mask. A single reply joins a block of similar length,
    row 1            ░ tok│ free                so that short rows are not read as far back as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin

States = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [B, H, L, D] of each layer, for B rows of L tokens without padding."""

GROWTH = 128
"""Columns of room that a move makes: rare enough to cost nothing, small beside a context."""

OWN_BLOCK_ROWS = 8
"""Rows that are worth a block of their own: a block costs a few calls in every layer."""

MOST_JOINED_ROWS, SIMILAR_TOKENS = 64, 64
"""Single replies share a block up to so many rows, and where their lengths differ by no more than that or a quarter."""


class Block:
    """keys, values: one buffer [capacity, H, width, D] for each layer. mask: [rows, 1, 1, width] if needed."""

    def __init__(self) -> None:
        self.rows = self.low = self.head = 0
        self._capacity = self._width = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.starts: list[int] = []
        self.mask: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    @property
    def span(self) -> int:
        return self.head - self.low

    def place(self, states: States, copies: int) -> None:
        """Add rows at the end: each of the B rows of ``states`` ``copies`` times, in order."""
        count, length = states[0][0].shape[0] * copies, states[0][0].shape[2]
        needed = self.rows + count
        if needed > self._capacity or self.head < length:
            places = self._capacity
            if needed > places:
                places = max(needed, min(2 * places, MOST_JOINED_ROWS)) if self.rows else needed
            self._move(places, max(length, self.span), states)
        part = (slice(self.rows, needed), slice(None), slice(self.head - length, self.head))
        for keys, values, (new_keys, new_values) in zip(self.keys, self.values, states, strict=True):
            keys[part], values[part] = _repeated(new_keys, copies), _repeated(new_values, copies)
        self.starts += [self.head - length] * count
        self._settle()

    def remove(self, gone: Sequence[int]) -> list[int]:
        """Take rows out; the last ones move into their places. Returns the rows that stay, in their new order."""
        order = compacted(self.rows, gone)
        moved = [place for place, row in enumerate(order) if place != row]
        if moved:
            into = torch.tensor(moved, device=self.keys[0].device)
            source = torch.tensor([order[place] for place in moved], device=into.device)
            for buffer in (*self.keys, *self.values):
                live = buffer[:, :, self.low : self.head]
                live[into] = live[source]
        self.starts = [self.starts[row] for row in order]
        self._settle()
        if self.rows and 2 * self.rows <= self._capacity:
            self._move(self.rows, self.span)
            self._settle()
        return order

    def states(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of one row's keys and values, [1, H, L, D]."""
        part = (slice(row, row + 1), slice(None), slice(self.starts[row], self.head))
        return [(keys[part].clone(), values[part].clone()) for keys, values in zip(self.keys, self.values, strict=True)]

    def make_room(self) -> None:
        """One more column fits."""
        if self.head == self._width:
            self._move(self._capacity, self.span)
            self._settle()

    def seen(self, layer: int, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask that the newest token sees, its own column included."""
        low = self.low if window is None else max(self.low, self.head + 1 - window)
        part = (slice(self.rows), slice(None), slice(low, self.head + 1))
        mask = None if self.mask is None else self.mask[..., low : self.head + 1]
        return self.keys[layer][part], self.values[layer][part], mask

    def _settle(self) -> None:
        """Rows or columns changed: who starts where, and what has to be hidden."""
        self.rows = len(self.starts)
        self.low = min(self.starts, default=self.head)
        if len(set(self.starts)) < 2:
            self.mask = None
            return
        like = self.keys[0]
        columns = torch.arange(self._width, device=like.device)
        hidden = columns < torch.tensor(self.starts, device=like.device).unsqueeze(1)
        self.mask = like.new_zeros(self.rows, self._width).masked_fill_(hidden, float("-inf"))[:, None, None]

    def _move(self, capacity: int, head: int, like: States | None = None) -> None:
        """New buffers of ``capacity`` rows, in which the live columns end at ``head``, one layer after the other.

        like: states of a block's first rows, for their shapes; a block that has rows looks like itself.
        """
        width, low = head + GROWTH, head - self.span
        for which, buffers in enumerate((self.keys, self.values)):
            if like is not None and not self.rows:
                buffers[:] = [pair[which] for pair in like]
            for layer, old in enumerate(buffers):
                _, heads, _, size = old.shape
                fresh = old.new_zeros(capacity, heads, width, size)
                if self.rows:
                    fresh[: self.rows, :, low:head] = old[: self.rows, :, self.low : self.head]
                buffers[layer] = fresh
        self.starts = [start + head - self.head for start in self.starts]
        self.low, self.head, self._capacity, self._width = low, head, capacity, width


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's share, as transformers' models want to see it."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: Slots, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner, self._number = owner, number
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens' [B, H, 1, D]; what the rows see is for ``Slots.attend``, which comes next."""
        self._owner.write(self._number, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max((block.span for block in self._owner.blocks), default=0)

    def get_max_length(self) -> int:
        return -1


class Slots(Cache):
    """The rows of a batch, as a cache that one decode step of a model runs on."""

    def __init__(self, layers: int, device: torch.device) -> None:
        super().__init__(layers=[SlotLayer(self, number) for number in range(layers)])
        self._device = device
        self.clear()

    def clear(self) -> None:
        self.blocks: list[Block] = []
        self._layer = 0
        """The layer that wrote last."""
        self._lengths: Tensor | None = None

    @property
    def rows(self) -> int:
        return sum(block.rows for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """What the buffers take, free places included."""
        return sum(block.nbytes for block in self.blocks)

    def place(self, states: States, copies: int) -> list[int]:
        """Add rows. Returns all rows in their new order, the new ones numbered after those that were there."""
        count, length = states[0][0].shape[0] * copies, states[0][0].shape[2]
        before = self.rows
        block = self._block_for(count, length)
        end = sum(one.rows for one in self.blocks[: self.blocks.index(block) + 1])
        block.place(states, copies)
        self._lengths = None
        return [*range(end), *range(before, before + count), *range(end, before)]

    def remove(self, gone: Sequence[int]) -> list[int]:
        """Take rows out. Returns the rows that stay, in their new order."""
        order, first = [], 0
        for block in list(self.blocks):
            rows = block.rows
            leaving = [row - first for row in gone if first <= row < first + rows]
            kept = block.remove(leaving) if leaving else range(rows)
            order += [first + row for row in kept]
            first += rows
            if not block.rows:
                self.blocks.remove(block)
        self._lengths = None
        return order

    def states(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of one row's keys and values, [1, H, L, D]."""
        for block in self.blocks:
            if row < block.rows:
                return block.states(row)
            row -= block.rows
        raise IndexError("there are fewer rows")

    def open(self) -> Tensor:
        """Make room for one more token of every row; their positions [B, 1]."""
        for block in self.blocks:
            block.make_room()
        if self._lengths is None:
            lengths = [block.head - start for block in self.blocks for start in block.starts]
            self._lengths = torch.tensor(lengths, device=self._device).unsqueeze(1)
        return self._lengths

    def close(self) -> None:
        """Every layer has written the new tokens."""
        for block in self.blocks:
            block.head += 1
        assert self._lengths is not None, "opened before"
        self._lengths += 1

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        first = 0
        for block in self.blocks:
            rows = slice(first, first + block.rows)
            column = (slice(block.rows), slice(None), slice(block.head, block.head + 1))
            block.keys[layer][column], block.values[layer][column] = keys[rows], values[rows]
            first += block.rows
        self._layer = layer

    def attend(self, query: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """What the newest tokens' queries [B, Q, 1, D] find in the layer that was just written, [B, 1, Q, D]."""
        found, first = [], 0
        for block in self.blocks:
            keys, values, mask = block.seen(self._layer, window)
            # Queries that share a key head are asked together: no keys are repeated.
            asked = query[first : first + block.rows].reshape(block.rows, keys.shape[1], -1, query.shape[-1])
            answer = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scaling)
            found.append(answer.reshape(block.rows, 1, query.shape[1], -1))
            first += block.rows
        return found[0] if len(found) == 1 else torch.cat(found)

    def _block_for(self, count: int, length: int) -> Block:
        if count < OWN_BLOCK_ROWS:
            reach = max(SIMILAR_TOKENS, length // 4)
            near = [
                block
                for block in self.blocks
                if block.rows + count <= MOST_JOINED_ROWS and abs(block.span - length) <= reach
            ]
            if near:
                return min(near, key=lambda block: abs(block.span - length))
        self.blocks.append(Block())
        return self.blocks[-1]


def compacted(rows: int, gone: Sequence[int]) -> list[int]:
    """The rows that stay, with as few of them in another place as can be: the last ones fill the gaps."""
    leaving = set(gone)
    left = rows - len(leaving)
    movers = iter([row for row in range(left, rows) if row not in leaving])
    return [next(movers) if row in leaving else row for row in range(left)]


def _repeated(states: Tensor, copies: int) -> Tensor:
    if copies == 1 or states.shape[0] == 1:
        return states.expand(max(copies, states.shape[0]), -1, -1, -1)
    return states.repeat_interleave(copies, 0)
