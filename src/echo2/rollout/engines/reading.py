"""The model behind a batch: prompts read, one token fed to every row, rows placed and removed.

Invariant: row b of ``step``'s logits follows row b's own tokens and nothing else. Readers know tensors and places, not
replies: who a row belongs to is the batch's affair.

``SlotReader`` serves every model whose layers attend to keys and values in the usual way, in full or through a window.
What keeps other states (recurrent, convolutional) or attends in a way of its own goes through ``WholeReader``: the
model's own cache, one group at a time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from echo2.rollout.engines import attention
from echo2.rollout.engines.prefixes import Prefixes
from echo2.rollout.engines.slots import GROWTH, Slots, compacted

WIDE = 8
"""Outputs per input from which a head is multiplied the other way round."""


class Reader(Protocol):
    together: bool
    """Rows of different groups, of different lengths, can grow together."""
    bytes_per_token: int
    """Of one row's states; 0 while nothing was read."""
    spare_tokens: int
    """Tokens that a row's place has room for beside its own."""

    def read(self, token_ids: Sequence[int]) -> tuple[Any, Tensor]:
        """(states of the prompt, logits [1, V] float32 of the next token)"""
        ...

    def reread(self, token_ids: Sequence[Sequence[int]]) -> Any:
        """States of several rows of equal length, read at once."""
        ...

    def place(self, states: Any, copies: int) -> list[int]:
        """Add rows, each of ``states`` ``copies`` times.

        Returns all rows in their new order, the new ones numbered after those that were there.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feed [B, 1] tokens, one to each row; logits [B, V] float32 of the next."""
        ...

    def keep(self, token_ids: Sequence[int], row: int) -> None:
        """Remember a row's states, which belong to these tokens, for prompts that begin with them."""
        ...

    def remove(self, gone: Sequence[int]) -> list[int]:
        """Take rows out. Returns the rows that stay, in their new order."""
        ...

    def clear(self) -> None:
        """Remove all rows."""
        ...

    def forget(self) -> None:
        """Remove whatever was computed so far: the weights change."""
        ...


def reader_for(model: Any, device: torch.device, prefix_bytes: int) -> Reader:
    """prefix_bytes: bound on what is kept of prompts that were read."""
    config = model.config.get_text_config()
    layers = DynamicCache(config=model.config).layers
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    attends = (
        all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
        and len(layers) == config.num_hidden_layers
        and kinds <= {"full_attention", "sliding_attention"}
    )
    # Only models that leave attention to a function that is named in their configuration take another one.
    replaceable = getattr(model, "_supports_attention_backend", False) and model.config._attn_implementation == "sdpa"
    if attends and replaceable:
        return SlotReader(model, device, len(layers), prefix_bytes)
    return WholeReader(model, device)


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
        return logits[:, -1].float().contiguous()


class SlotReader:
    together = True
    spare_tokens = GROWTH

    def __init__(self, model: Any, device: torch.device, layers: int, prefix_bytes: int) -> None:
        model.set_attn_implementation(attention.NAME)
        if device.type == "cpu":
            _widen_head(model)
        self._model = _Model(model, device)
        self._slots = Slots(layers, device)
        self._prefixes = Prefixes(prefix_bytes)
        self.bytes_per_token = 0

    def read(self, token_ids: Sequence[int]) -> tuple[Any, Tensor]:
        known, states = self._prefixes.longest(token_ids)
        # Plain layers even where the model has windows: the prefix of a prompt must be whole.
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

    def place(self, states: Any, copies: int) -> list[int]:
        return self._slots.place(states, copies)

    def step(self, tokens: Tensor) -> Tensor:
        positions = self._slots.open()
        with attention.decoding(self._slots):
            logits = self._model(self._slots, tokens, position_ids=positions)
        self._slots.close()
        return logits

    def keep(self, token_ids: Sequence[int], row: int) -> None:
        self._prefixes.keep(token_ids, self._slots.states(row))

    def remove(self, gone: Sequence[int]) -> list[int]:
        return self._slots.remove(gone)

    def clear(self) -> None:
        self._slots.clear()

    def forget(self) -> None:
        self.clear()
        self._prefixes.clear()


class WholeReader:
    together = False
    bytes_per_token = spare_tokens = 0

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

    def place(self, states: Any, copies: int) -> list[int]:
        assert self.rows == 0, "one group at a time"
        if copies > 1:
            order = torch.arange(self._read_rows, device=self._device).repeat_interleave(copies)
            states.reorder_cache(order)  # the one way in which every kind of layer takes rows
        self._cache = states
        self.rows = copies * self._read_rows
        return list(range(self.rows))

    def step(self, tokens: Tensor) -> Tensor:
        return self._model(self._cache, tokens)

    def keep(self, token_ids: Sequence[int], row: int) -> None:
        return

    def remove(self, gone: Sequence[int]) -> list[int]:
        order = compacted(self.rows, gone)
        if order:
            self._cache.reorder_cache(torch.tensor(order, device=self._device))
            self.rows = len(order)
        else:
            self.clear()
        return order

    def clear(self) -> None:
        self._cache = None
        self.rows = 0

    forget = clear


def _states(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _widen_head(model: Any) -> None:
    """Let the output head of a CPU model multiply the other way round.

    It is far wider than it is high, and a BLAS that splits the rows of its first factor then keeps every core busy:
    half the time for 64 tokens and a vocabulary of 49,152. The numbers are the same up to rounding.
    """
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear and head.out_features > WIDE * head.in_features:
        forward = functools.partial(_wide, head)
        head.forward = forward  # type: ignore[method-assign]


def _wide(head: torch.nn.Linear, input: Tensor) -> Tensor:
    """[B, L, H] → [B, L, V]"""
    logits = torch.mm(head.weight, input.flatten(0, -2).t()).t().reshape(*input.shape[:-1], -1)
    return logits if head.bias is None else logits + head.bias
