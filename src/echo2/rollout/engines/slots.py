"""Keys and values of many growing rows, in one tensor per layer.

Invariant: row b holds its tokens in columns ``[start_b, head)``; what lies left of them is hidden by the mask and is
always a number. Rows are the first B of the buffers. Aligned on the right, a step writes one column for all of them and
copies nothing; a row that ends gives its place to the last one.

    columns   0 …… low ……………… head ……… width
    row 0            ░░░░ tokens │ free     ░ hidden
    row 1            tokens      │ free
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

States = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [B, H, L, D] of each layer, for B rows of L tokens without padding."""

GROWTH = 128
"""Columns of room that a move makes: rare enough to cost nothing, small beside a context."""


class SlotLayer(CacheLayerMixin):
    """One layer's share, as transformers' models want to see it."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: Slots) -> None:
        super().__init__()
        self._owner = owner
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[B, H, 1, D] of the new tokens → all that the rows can see, [B, H, head − low + 1, D]."""
        rows, low, head = self._owner.rows, self._owner.low, self._owner.head
        self.keys[:rows, :, head : head + 1] = key_states
        self.values[:rows, :, head : head + 1] = value_states
        return self.keys[:rows, :, low : head + 1], self.values[:rows, :, low : head + 1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._owner.head - self._owner.low

    def get_max_length(self) -> int:
        return -1

    def reach(self, rows: int, width: int, kept: int, low: int, head: int, new_head: int, like: tuple[Tensor, Tensor]) -> None:
        """Move columns [low, head) of the first ``kept`` rows into new buffers, so that they end at ``new_head``."""
        for name, states in zip(("keys", "values"), like, strict=True):
            _, heads, _, size = states.shape
            fresh = states.new_zeros(rows, heads, width, size)
            if kept:
                fresh[:kept, :, new_head - (head - low) : new_head] = getattr(self, name)[:kept, :, low:head]
            setattr(self, name, fresh)


class Slots(Cache):
    """rows, low, head: see the module. ``starts`` [B]: first column of each row."""

    def __init__(self, layers: int, float_mask: torch.dtype | None, device: torch.device) -> None:
        """float_mask: type of an additive mask [B, 1, 1, L]; None for a plain one [B, L], which suits every model."""
        self._own = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._own))
        self._float_mask = float_mask
        self._device = device
        self.clear()

    def clear(self) -> None:
        self.rows = self.low = self.head = 0
        self._capacity = self._width = 0
        self.starts: list[int] = []
        self._mask = torch.empty(0)
        for layer in self._own:
            layer.keys = layer.values = None

    def place(self, states: States, copies: int) -> None:
        """Add rows: each of the B rows of ``states`` (L tokens) ``copies`` times, in order."""
        count, length = states[0][0].shape[0] * copies, states[0][0].shape[2]
        self._make_room(count, length, states)
        rows, head = self.rows, self.head
        for layer, pair in zip(self._own, states, strict=True):
            for whole, new in zip((layer.keys, layer.values), pair, strict=True):
                assert whole is not None, "there is room"
                whole[rows : rows + count, :, head - length : head] = new if copies == 1 else _repeated(new, copies)
        self._hide(slice(rows, rows + count), head - length)
        self.starts += [head - length] * count
        self.rows += count
        self.low = min(self.starts)

    def remove(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take rows out; returns (places, rows): who has to move into which place, for tables kept beside this one."""
        leaving = set(gone)
        left = self.rows - len(leaving)
        movers = [row for row in range(left, self.rows) if row not in leaving]
        places = [row for row in sorted(leaving) if row < left]
        if movers and places:
            into, source = torch.tensor(places, device=self._device), torch.tensor(movers, device=self._device)
            for layer in self._own:
                for whole in (layer.keys, layer.values):
                    assert whole is not None, "rows have states"
                    live = whole[:, :, self.low : self.head]
                    live[into] = live[source]
            self._mask[into] = self._mask[source]
            for place, mover in zip(places, movers, strict=True):
                self.starts[place] = self.starts[mover]
        self.rows = left
        del self.starts[left:]
        if left:
            self.low = min(self.starts)
        else:
            self.low = self.head = 0  # the buffers stay: the next rows begin at their left end
        return places, movers

    def states(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of one row's keys and values, [1, H, L, D]."""
        part = (slice(row, row + 1), slice(None), slice(self.starts[row], self.head))
        taken = []
        for layer in self._own:
            assert layer.keys is not None and layer.values is not None, "rows have states"
            taken.append((layer.keys[part].clone(), layer.values[part].clone()))
        return taken

    def open_column(self) -> Tensor:
        """Make sure that one more column fits; the mask for it, [B, L] or [B, 1, 1, L], L = head − low + 1."""
        if self.head + 1 > self._width:
            self._move(self._capacity, self.head - self.low)
        return self._mask[: self.rows, ..., self.low : self.head + 1]

    def close_column(self) -> None:
        """Every layer has written the open column."""
        self.head += 1

    # ---- buffers -----------------------------------------------------------------------------------------------

    def _make_room(self, count: int, length: int, like: States) -> None:
        needed = self.rows + count
        left = max(length, self.head - self.low)
        if needed > self._capacity:
            self._move(max(needed, min(2 * self._capacity, needed + 64)), left, like)
        elif self.head < length:
            if self.rows or self._width < length:
                self._move(self._capacity, left, like)
            else:
                self.low = self.head = length

    def _move(self, capacity: int, head: int, like: States | None = None) -> None:
        """New buffers of ``capacity`` rows, in which the live columns end at ``head``; ``like`` shows first shapes."""
        width = head + GROWTH
        for number, layer in enumerate(self._own):
            pair = like[number] if like is not None else (layer.keys, layer.values)
            assert pair[0] is not None and pair[1] is not None, "shapes are known"
            layer.reach(capacity, width, self.rows, self.low, self.head, head, (pair[0], pair[1]))
        shift = head - self.head
        self.starts = [start + shift for start in self.starts]
        self.low, self.head, self._capacity, self._width = head - (self.head - self.low), head, capacity, width
        if self._float_mask is None:
            self._mask = torch.ones(capacity, width, dtype=torch.bool, device=self._device)
        else:
            self._mask = torch.zeros(capacity, 1, 1, width, dtype=self._float_mask, device=self._device)
        for row, start in enumerate(self.starts):
            self._hide(slice(row, row + 1), start)

    def _hide(self, rows: slice, start: int) -> None:
        if self._float_mask is None:
            self._mask[rows, :start], self._mask[rows, start:] = False, True
        else:
            self._mask[rows, ..., :start], self._mask[rows, ..., start:] = float("-inf"), 0.0


def _repeated(states: Tensor, copies: int) -> Tensor:
    return states.expand(copies, -1, -1, -1) if states.shape[0] == 1 else states.repeat_interleave(copies, 0)
