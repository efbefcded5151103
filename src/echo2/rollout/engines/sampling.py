"""From logits to sampled tokens and their log-probs.

Invariant: a row's token depends on its own logits and its own uniform number alone, never on which rows share the
batch; log-probs are float32 log-softmax over the whole vocabulary of logits / temperature, whatever top-p cut away
(PROTOCOL §4, field report C06).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from echo2.errors import EngineError


def uniforms(seed: int, row: int, count: int) -> Tensor:
    """[count] float64 in [0, 1) of row ``row`` of a generation seeded with ``seed``; drawn on the CPU everywhere.

    The row's stream is seeded by a hash: neighbouring seeds and rows share nothing.
    """
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    logits [B, V] float32; temperature, top_p [B, 1] float32; uniform [B, 1] float64 in [0, 1).
    Returns tokens [B] int64 and their log-probs [B] float32. Raises EngineError for logits that are not numbers.
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    mass = logprobs.double().exp_()
    if bool((top_p < 1).any()):
        mass = _nucleus(mass, top_p)
    cumulative = mass.cumsum_(dim=-1)
    total = cumulative[:, -1:]
    if not bool(total.isfinite().all()):
        raise EngineError("logits must be numbers, the model gave others; the policy has diverged")
    # The target stays below the total, so the first larger entry always exists and has mass of its own.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def _nucleus(mass: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose mass reaches top_p; not renormalised. [B, V] → [B, V]"""
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(mass).scatter_(1, order, kept)
