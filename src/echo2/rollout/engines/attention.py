"""How a model attends while the engine runs it: to slots when decoding, to a plain prompt otherwise.

Invariant: the same numbers as transformers' own ``sdpa``, up to rounding. Registered under a name of its own, so that
models build no masks in the steps where none is needed; calls with what it does not know are refused, not ignored.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from echo2.rollout.engines.slots import Slots

NAME = "echo2_slots"

UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments of some models' attention that change the numbers and are not built here."""

_running = threading.local()


@contextmanager
def decoding(slots: Slots) -> Iterator[None]:
    """Attention of this thread goes to ``slots``."""
    _running.slots = slots
    try:
        yield
    finally:
        _running.slots = None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: [B, Q, L, D] queries → [B, L, Q, D]."""
    refused = [name for name in UNKNOWN if others.get(name) is not None]
    if refused:
        raise NotImplementedError(f"attention with {', '.join(refused)} is not known to this engine")
    slots: Slots | None = getattr(_running, "slots", None)
    if slots is not None:
        return slots.attend(query, scaling, sliding_window), None
    mask = _causal(query.shape[2], key.shape[2], sliding_window, query.device)
    found, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    return found, None


@functools.lru_cache(maxsize=4)
def _causal(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """[1, 1, queries, keys] for queries that are the last of the keys; None where plain causal attention is meant."""
    if queries == keys and (window is None or keys <= window):
        return None
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    allowed = distance >= 0
    if window is not None:
        allowed &= distance < window
    return allowed[None, None]


AttentionInterface.register(NAME, attend)
