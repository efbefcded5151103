"""Whether a micro-batch fits into this machine's memory, asked before it is computed.

Invariant: what can be split is split, on all ranks alike; only a trajectory that cannot fit alone is refused. A forward
pass keeps so many bytes a token for its backward pass; that is measured on the model itself and held against the memory
that is free. On a GPU its own allocator says so in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from echo2.errors import UserError
from echo2.learning.batch import TrainingRow
from echo2.learning.packing import MicroBatch, pack

if TYPE_CHECKING:
    from echo2.learning.policy_model import PolicyModel

LONG_PROBE = 96
"""Tokens of the longer of two passes whose difference is what a token keeps; fewer where a model has no more places."""
ROOM_SHARE = 0.7
"""Of the free memory, for what is kept: the backward pass makes gradients beside it."""
MEMORY_FACTS = Path("/proc/meminfo")


class Room(msgspec.Struct, frozen=True):
    """What one rank says of its micro-batches."""

    tokens: int
    """Of the largest."""
    longest: int
    """Of its longest sheet, which cannot be split further."""
    fits: int | None
    """Tokens that a micro-batch may have; None where all fit."""
    kept_bytes: float
    free_bytes: int


def room_of(policy: PolicyModel, micros: Sequence[MicroBatch], ranks_here: int) -> Room:
    """ranks_here: so many share the free memory of this machine."""
    tokens = max((micro.tokens.numel() for micro in micros), default=0)
    longest = max((micro.tokens.shape[1] for micro in micros), default=0)
    everything = free_bytes() if policy.device.type == "cpu" and micros else None
    if everything is None:
        return Room(tokens, longest, None, 0.0, 0)
    free, kept = everything // ranks_here, policy.kept_bytes_per_token
    fits = None if tokens * kept <= free else max(1, int(ROOM_SHARE * free / kept))
    return Room(tokens, longest, fits, tokens * kept, free)


def budget_that_fits(rooms: Sequence[Room], budget: int) -> int:
    """Tokens per micro-batch that every rank has room for. Raises UserError where a trajectory alone has more.

    budget: ``learning.micro_batch_tokens``.
    """
    tight = [room for room in rooms if room.fits is not None]
    if not tight:
        return budget
    fits = min(room.fits for room in tight if room.fits is not None)
    longest = max(room.longest for room in rooms)
    if longest <= fits:
        return min(budget, fits)
    room = max(tight, key=lambda told: told.kept_bytes)
    raise UserError(
        f"a trajectory's micro-batch must fit into memory: of {room.tokens} tokens this model keeps"
        f" {room.kept_bytes / 1e9:.1f} GB for the backward pass, {room.free_bytes / 1e9:.1f} GB are free, and a"
        f" trajectory alone has {longest}: shorten them to {fits}, or set learning.activation_checkpointing"
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
    places = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or LONG_PROBE
    long = min(LONG_PROBE, places)
    short = max(1, long // 3)
    return (_kept_bytes(policy, long) - _kept_bytes(policy, short)) / max(1, long - short)


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
