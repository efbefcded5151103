"""The model behind a batch: prompts read, one token fed to every row, rows placed and removed.

Invariant: row b of ``step``'s logits follows row b's own tokens and nothing else. Readers know tensors and places, not
replies: who a row belongs to is the batch's affair.

``SlotReader`` serves every model whose layers attend to keys and values, in full or through a window. What keeps other
states (recurrent, convolutional) goes through ``WholeReader``: the model's own cache, one group at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from echo2.rollout.engines.prefixes import Prefixes
from echo2.rollout.engines.slots import Slots


class Reader(Protocol):
    together: bool
    """Rows of different groups, of different lengths, can grow together."""
    rows: int
    bytes_per_token: int
    """Of one row's states; 0 while nothing was read."""

    def read(self, token_ids: Sequence[int]) -> tuple[Any, Tensor]:
        """(states of the prompt, logits [1, V] float32 of the next token)"""
        ...

    def reread(self, token_ids: Sequence[Sequence[int]]) -> Any:
        """States of several rows of equal length, read at once."""
        ...

    def place(self, states: Any, copies: int) -> None: ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feed [B, 1] tokens, one to each row; logits [B, V] float32 of the next."""
        ...

    def keep(self, token_ids: Sequence[int], row: int) -> None:
        """Remember a row's states, which belong to these tokens, for prompts that begin with them."""
        ...

    def remove(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        """(places, rows): the rows that moved into places that came free; the batch shrinks by what is gone."""
        ...

    def clear(self) -> None:
        """Remove all rows."""
        ...

    def forget(self) -> None:
        """Remove whatever was computed so far: the weights change."""
        ...


def reader_for(model: Any, device: torch.device, prefix_bytes: int) -> Reader:
    """prefix_bytes: bound on what is kept of prompts that were read."""
    layers = DynamicCache(config=model.config).layers
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    attends = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    if not attends or not kinds <= {"full_attention", "sliding_attention"}:
        return WholeReader(model, device)
    windows = any(type(layer) is DynamicSlidingWindowLayer for layer in layers)
    # An additive mask is passed on as it is by models of the common attention interface; windows need the model's own.
    additive = getattr(model, "_supports_attention_backend", False) and not windows
    return SlotReader(model, device, len(layers), model.dtype if additive else None, prefix_bytes)


class _Model:
    """One call of a causal LM."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        # The cache's argument was renamed during the life of transformers 5.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "past_key_values" if "cache" not in parameters else "cache"

    def __call__(self, cache: Any, tokens: Tensor, **more: Tensor) -> Tensor:
        """[B, L] → logits [B, V] float32 after the last of them"""
        arguments = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1, **more}
        logits: Tensor = self._model(input_ids=tokens.to(self._device), **arguments).logits
        return logits[:, -1].float()


class SlotReader:
    together = True

    def __init__(
        self, model: Any, device: torch.device, layers: int, float_mask: torch.dtype | None, prefix_bytes: int
    ) -> None:
        self._model = _Model(model, device)
        self._device = device
        self._slots = Slots(layers, float_mask, device)
        self._prefixes = Prefixes(prefix_bytes)
        self.bytes_per_token = 0
        self._starts: Tensor | None = None
        """[B, 1]; None when rows changed since."""

    @property
    def rows(self) -> int:
        return self._slots.rows

    def read(self, token_ids: Sequence[int]) -> tuple[Any, Tensor]:
        known, states = self._prefixes.longest(token_ids)
        # Plain layers even where the model has windows: the batch aligns rows by columns and masks.
        cache = DynamicCache()
        for number, (keys, values) in enumerate(states):
            cache.update(keys, values, number)
        logits = self._model(cache, torch.tensor([token_ids[known:]]))
        read = _states(cache)
        self.bytes_per_token = sum(keys.nbytes + values.nbytes for keys, values in read) // len(token_ids)
        self._prefixes.keep(token_ids, read)
        return read, logits

    def reread(self, token_ids: Sequence[Sequence[int]]) -> Any:
        cache = DynamicCache()
        self._model(cache, torch.tensor(token_ids))
        return _states(cache)

    def place(self, states: Any, copies: int) -> None:
        self._slots.place(states, copies)
        self._starts = None

    def step(self, tokens: Tensor) -> Tensor:
        mask = self._slots.open_column()
        if self._starts is None:
            self._starts = torch.tensor(self._slots.starts, device=self._device).unsqueeze(1)
        logits = self._model(self._slots, tokens, attention_mask=mask, position_ids=self._slots.head - self._starts)
        self._slots.close_column()
        return logits

    def keep(self, token_ids: Sequence[int], row: int) -> None:
        self._prefixes.keep(token_ids, self._slots.states(row))

    def remove(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        self._starts = None
        return self._slots.remove(gone)

    def clear(self) -> None:
        self._slots.clear()
        self._starts = None

    def forget(self) -> None:
        self.clear()
        self._prefixes.clear()


class WholeReader:
    together = False
    bytes_per_token = 0

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = _Model(model, device)
        self._config = model.config
        self._device = device
        self._cache: Any = None
        self._read_rows = 0
        """Rows of what was read last, which is what is placed next."""
        self.rows = 0

    def read(self, token_ids: Sequence[int]) -> tuple[Any, Tensor]:
        cache = DynamicCache(config=self._config)
        self._read_rows = 1
        return cache, self._model(cache, torch.tensor([token_ids]))

    def reread(self, token_ids: Sequence[Sequence[int]]) -> Any:
        cache = DynamicCache(config=self._config)
        self._read_rows = len(token_ids)
        self._model(cache, torch.tensor(token_ids))
        return cache

    def place(self, states: Any, copies: int) -> None:
        assert self.rows == 0, "one group at a time"
        if copies > 1:
            states.batch_repeat_interleave(copies)
        self._cache = states
        self.rows = copies * self._read_rows

    def step(self, tokens: Tensor) -> Tensor:
        return self._model(self._cache, tokens)

    def keep(self, token_ids: Sequence[int], row: int) -> None:
        return

    def remove(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        leaving = set(gone)
        left = self.rows - len(leaving)
        movers = [row for row in range(left, self.rows) if row not in leaving]
        places = [row for row in sorted(leaving) if row < left]
        if not left:
            self.clear()
            return [], []
        order = list(range(left))
        for place, mover in zip(places, movers, strict=True):
            order[place] = mover
        self._cache.batch_select_indices(torch.tensor(order, device=self._device))
        self.rows = left
        return places, movers

    def clear(self) -> None:
        self._cache = None
        self.rows = 0

    forget = clear


def _states(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]
