"""What an objective is given and what it returns.

Invariant: an objective is a pure function of per-token tensors; it returns the *sum* of the loss over loss-bearing
tokens. The caller divides by the loss-bearing tokens of the whole update, so no split into micro-batches can change the
result (field report C04).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echo2.learning.kl import Estimator, kl_per_token

LARGEST_LOG_RATIO = 20.0
"""|log ρ| is clamped here before exp; far outside any clip range, it only keeps e^x finite."""


@dataclass(frozen=True)
class TokenTerms:
    """Log-probs of T sampled tokens, all at the sampling temperature, all float32."""

    logp: Tensor
    """[T] log π_θ, with gradient"""
    logp_prox: Tensor
    """[T] log π_prox: the learner's own policy at the start of the step, no gradient"""
    logp_behaviour: Tensor
    """[T] log π_behaviour as the engine reported it; meaningless where not ``known``"""
    known: Tensor
    """[T] bool: the engine reported the log-prob under a convention the learner shares"""
    current: Tensor
    """[T] bool: sampled under the version the step starts from, so that π_prox is the learner's π at sampling"""
    logp_ref: Tensor | None
    """[T] log π_ref, no gradient; None when the KL term is off"""
    advantages: Tensor
    """[T] of the token's trajectory"""
    mask: Tensor
    """[T] bool: the token carries loss"""


@dataclass(frozen=True)
class ObjectiveSettings:
    clip_low: float = 0.2
    clip_high: float = 0.2
    truncation: float = 2.0
    """C"""
    kl_beta: float = 0.0
    kl_estimator: Estimator = "k3"


@dataclass(frozen=True)
class ObjectiveSums:
    """Sums over the loss-bearing tokens."""

    loss: Tensor
    """[] with gradient: minus the objective"""
    ratio: Tensor
    """[] of ρ"""
    clipped: Tensor
    """[] number of tokens whose clipped term was the smaller one: they have no gradient through ρ"""
    weight: Tensor
    """[] of w"""
    kl: Tensor
    """[] of the KL estimate; 0 when the term is off"""


class Objective(Protocol):
    def __call__(self, terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums: ...


def bounded_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """[T] exp(logp - logp_old), finite for finite inputs."""
    return (logp - logp_old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def truncated_weight(logp_numerator: Tensor, logp_denominator: Tensor, truncation: float) -> Tensor:
    """[T] min(exp(numerator - denominator), C) without gradient (paper appendix D)."""
    difference = (logp_numerator - logp_denominator).detach()
    return difference.clamp(max=LARGEST_LOG_RATIO).exp().clamp(max=truncation)


def clipped_surrogate(terms: TokenTerms, ratio: Tensor, weight: Tensor, settings: ObjectiveSettings) -> ObjectiveSums:
    """Sums of w·(min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A) - β·KL) over loss-bearing tokens."""
    plain = ratio * terms.advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * terms.advantages
    gain = torch.minimum(plain, clipped)
    if terms.logp_ref is None:
        kl = torch.zeros_like(gain)
    else:
        kl = kl_per_token(terms.logp, terms.logp_ref, settings.kl_estimator)
        gain = gain - settings.kl_beta * kl

    def total(values: Tensor) -> Tensor:
        # where, not a product: what stands at a masked position must not matter even when it is not finite
        return torch.where(terms.mask, values, torch.zeros_like(values)).sum()

    return ObjectiveSums(
        loss=-total(weight * gain),
        ratio=total(ratio.detach()),
        clipped=total((clipped < plain).to(gain.dtype)),
        weight=total(weight),
        kl=total(kl.detach()),
    )
