"""Decoupled PPO as AReaL trains with it (arXiv 2505.24298; first arXiv 2110.00641).

    ρ = π_θ / π_prox        w = π_prox / π_behaviour
    J = mean over tokens of w·( min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A) - β·KL ),  0 for tokens with w > C

w is not truncated, as ``grpo`` does: a token that needs too large a weight is dropped.

Checked against AReaL's code: its earlier default masked tokens whose weight exceeds 5, and it divides by the tokens
before masking, as here. The paper's formula has no bound on w.

Deviations: group-relative advantages instead of the paper's PPO returns; w is 1 where the engine reported no usable
log-prob; |log ρ| is clamped to 20.
"""

from __future__ import annotations

import torch

from echo2.learning.objectives.terms import (
    ObjectiveSettings,
    ObjectiveSums,
    TokenTerms,
    behaviour_logp,
    bounded_ratio,
    clip,
    token_sums,
)


def decoupled_ppo(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    weight = bounded_ratio(terms.logp_prox, behaviour_logp(terms)).detach()
    dropped = weight > settings.truncation
    ratio = bounded_ratio(terms.logp, terms.logp_prox)
    gain, clipped = clip(ratio, terms.advantages, settings)
    kept = torch.where(dropped, torch.zeros_like(weight), weight)
    return token_sums(terms, settings, gain, ratio=ratio, dropped=clipped | dropped, weight=kept)
