"""Whether a micro-batch fits into this machine's memory, asked before it is computed.

Invariant: only what cannot fit is refused. A forward pass keeps so many bytes a token for its backward pass; that is
measured on the model itself and held against the memory that is free. On a GPU its own allocator says so in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from echo2.errors import UserError
from echo2.learning.batch import TrainingRow
from echo2.learning.packing import MicroBatch, pack

if TYPE_CHECKING:
    from echo2.learning.policy_model import PolicyModel

SHORT_PROBE, LONG_PROBE = 32, 96
"""Tokens of the two passes whose difference is what a token keeps."""
ROOM_SHARE = 0.7
"""Of the free memory, for what is kept: the backward pass makes gradients beside it."""
MEMORY_FACTS = Path("/proc/meminfo")


def require_room(policy: PolicyModel, micros: Sequence[MicroBatch], budget: int) -> None:
    """Raises UserError for a micro-batch that would not fit. budget: ``learning.micro_batch_tokens``."""
    if policy.device.type != "cpu" or not micros:
        return
    free = free_bytes()
    if free is None:
        return
    largest = max(micros, key=lambda micro: micro.tokens.numel())
    tokens, kept = largest.tokens.numel(), policy.kept_bytes_per_token
    if tokens * kept <= free:
        return
    fits = max(1, int(ROOM_SHARE * free / kept))
    longest = max(micro.tokens.shape[1] for micro in micros)
    cure = f"set it to {fits}" if longest <= fits else f"a trajectory alone has {longest}: shorten them to {fits}"
    raise UserError(
        f"learning.micro_batch_tokens must fit into memory: of {tokens} tokens this model keeps"
        f" {tokens * kept / 1e9:.1f} GB for the backward pass, {free / 1e9:.1f} GB are free (it is {budget}; {cure})"
    )


def free_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    try:
        facts = dict(line.split(":", 1) for line in MEMORY_FACTS.read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def kept_bytes_per_token(policy: PolicyModel) -> float:
    """Bytes that one more token of a micro-batch has the forward pass keep for the backward pass."""
    kept = [_kept_bytes(policy, tokens) for tokens in (SHORT_PROBE, LONG_PROBE)]
    return (kept[1] - kept[0]) / (LONG_PROBE - SHORT_PROBE)


def _kept_bytes(policy: PolicyModel, tokens: int) -> int:
    loss = np.arange(tokens) == tokens - 1
    row = TrainingRow(0, np.zeros(tokens, np.int64), loss, None, 0.0, 1.0, current=True, nucleus=False)
    (micro,) = pack([row], budget=tokens, share_prefixes=False)
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logprobs(micro)
    return sum(held.values())
