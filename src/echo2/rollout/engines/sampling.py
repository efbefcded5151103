"""From logits to sampled tokens and their log-probs.

Invariant: a row's token depends on its own logits and its own uniform number alone, never on which rows share the
batch; log-probs are float32 log-softmax over the whole vocabulary of logits / temperature, whatever top-p cut away
(PROTOCOL §4, field report C06).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional

from echo2.errors import EngineError

BLOCK = 128
"""Neighbouring tokens whose mass is summed first, so that exact sums run over few numbers."""


def uniforms(seed: int, row: int, count: int) -> Tensor:
    """[count] float64 in [0, 1) of row ``row`` of a generation seeded with ``seed``; drawn on the CPU everywhere.

    The row's stream is seeded by a hash: neighbouring seeds and rows share nothing.
    """
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def draw(
    logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor, *, cut: bool = True
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    logits [B, V] float32; temperature, top_p [B, 1] float32; uniform [B, 1] float64 in [0, 1).
    cut: whether any top_p is below 1.
    Returns tokens [B] int64 and their log-probs [B] float32. Raises EngineError for logits that are not numbers.
    """
    whole = torch.softmax(logits / temperature, dim=-1)
    mass = _nucleus(whole, top_p) if cut else whole
    # Two levels: a running sum over the whole vocabulary in float64 would cost more than the softmax.
    blocks = functional.pad(mass, (0, -mass.shape[1] % BLOCK)).view(len(mass), -1, BLOCK)
    by_block = blocks.sum(-1).double()
    block, before = _inverse(by_block, uniform * by_block.sum(-1, keepdim=True))
    inner = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double()
    token, _ = _inverse(inner, uniform * by_block.sum(-1, keepdim=True) - before)
    tokens = block * BLOCK + token
    chosen = whole.gather(1, tokens.clamp_(max=logits.shape[1] - 1))
    if not bool((chosen > 0).all()):
        raise EngineError("logits must be numbers, the model gave others; the policy has diverged")
    return tokens.squeeze(1), chosen.log().squeeze(1)


def _inverse(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the entry where the running sum passes ``target``, sum before it), each [B, 1]; entry has mass.

    mass [B, N] float64, target [B, 1] float64. A target that rounding put outside is drawn to the nearest entry.
    """
    cumulative = mass.cumsum(-1)
    total = cumulative[:, -1:]
    # The target stays below the total, so the first larger sum always exists and its entry has mass of its own.
    inside = torch.minimum(target.clamp(min=0.0), torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, inside, right=True).clamp_(max=mass.shape[1] - 1)
    return index, cumulative.gather(1, index) - mass.gather(1, index)


def _nucleus(mass: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose mass reaches top_p; not renormalised. [B, V] → [B, V]"""
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(mass).scatter_(1, order, kept)
