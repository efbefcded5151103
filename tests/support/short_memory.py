"""A model that runs out of memory above so many tokens, as a GPU's allocator says it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echo2.learning.policy_model import PolicyModel, blocks_of

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def short_of_memory(policy: PolicyModel, tokens: int, when: str) -> None:
    """when: "forward" or "backward", in the middle of the last block."""
    _ = policy.kept_bytes_per_token  # measured by passes of its own
    layer: Any = blocks_of(policy.model)[-1]
    inner = layer.mlp.forward

    def forward(hidden: Tensor) -> Tensor:
        if hidden.shape[:-1].numel() > tokens:
            if when == "forward":
                raise torch.OutOfMemoryError(OUT)
            if hidden.requires_grad:
                hidden.register_hook(_strike)
        found: Tensor = inner(hidden)
        return found

    layer.mlp.forward = forward


def _strike(_: Tensor) -> None:
    raise torch.OutOfMemoryError(OUT)
