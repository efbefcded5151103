"""Replies that a tiny model samples, as honest and dishonest workers would send them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trajectories import trajectory

from echo2.types import Trajectory

REPLY_TOKENS = 32


@torch.no_grad()
def sampled(
    model: Any,
    prompts: list[list[int]],
    version: int = 0,
    *,
    temperature: float = 1.0,
    told_by: Any = None,
    told_temperature: float | None = None,
    seed: int = 1,
) -> list[Trajectory]:
    """A reply to each prompt, all prompts as long; records that claim temperature 1.

    told_by, told_temperature: whose log-probs are sent with the tokens; by default those that they were sampled with.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(prompts)
    for _ in range(REPLY_TOKENS):
        drawn = torch.multinomial(_logprobs(model, tokens, temperature)[:, -1].exp(), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
    told = _logprobs(told_by or model, tokens, told_temperature or temperature)[:, len(prompts[0]) - 1 : -1]
    replies = tokens[:, len(prompts[0]) :]
    chosen = told.gather(2, replies[:, :, None])[:, :, 0]
    return [
        trajectory(prompt, reply, float(reply[0] % 2), logprobs=values, version=version)
        for prompt, reply, values in zip(prompts, replies.tolist(), chosen.tolist(), strict=True)
    ]


def _logprobs(model: Any, tokens: Tensor, temperature: float) -> Tensor:
    """[B, L] → [B, L, V] float32"""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits.float()
    return (logits / temperature).log_softmax(-1)
