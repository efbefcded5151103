"""What an objective is given and what it returns.

Invariant: an objective is a pure function of per-token tensors; it returns the *sum* of the loss over loss-bearing
tokens. The caller divides by a normaliser of the whole update, which the objective names, so no split into
micro-batches can change the result (field report C04). What an objective must know of the whole update before any
gradient is a tensor of plain sums: those of micro-batches, and of ranks, are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from echo2.learning.kl import Estimator, kl_per_token

LARGEST_LOG_RATIO = 20.0
"""|log ρ| is clamped here before exp; far outside any clip range, it only keeps e^x finite."""


@dataclass(frozen=True)
class TokenTerms:
    """Log-probs of T sampled tokens of N whole rows, all at the sampling temperature, all float32."""

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
    nucleus: Tensor
    """[T] bool: top-p was below 1, so ``logp_behaviour`` only approximates what the token was drawn from"""
    logp_ref: Tensor | None
    """[T] log π_ref, no gradient; None when the KL term is off"""
    advantages: Tensor
    """[T] of the token's trajectory"""
    mask: Tensor
    """[T] bool: the token carries loss"""
    lengths: Tensor
    """[N] int64 tokens of each row; the tokens of a row are neighbours, in order"""
    group: Tensor
    """[N] int64 number of each row's group within the batch"""
    groups: int
    """Groups of the batch."""
    whole: Tensor | None = None
    """What ``Objective.statistics`` gives for the whole update; None for objectives without."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """What an objective may read; ``config/objectives.py`` says which reads what, and its own defaults."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    truncation: float = 2.0
    """C"""
    second_moment: float = 0.04
    """τ of M2PO"""
    longest_reply: int = 1
    """Token limit of one reply, Dr. GRPO's constant."""
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
    """[] number of tokens without gradient through ρ: the clipped term was the smaller one, or they were dropped"""
    weight: Tensor
    """[] of w"""
    kl: Tensor
    """[] of the KL estimate; 0 when the term is off"""


@dataclass(frozen=True)
class Objective:
    """What a step maximises. ``mean`` decides the normaliser of an update, from counts over the whole of it."""

    sums: Callable[[TokenTerms, ObjectiveSettings], ObjectiveSums]
    mean: Literal["tokens", "rows", "constant"] = "tokens"
    statistics: Callable[[TokenTerms, ObjectiveSettings], Tensor] | None = None
    """[K] float64 sums over a micro-batch, from the terms before any update of the step (θ = prox)."""

    def normaliser(self, tokens: int, rows: int, settings: ObjectiveSettings) -> int:
        """By which an update's summed loss is divided.

        tokens: loss-bearing, of all micro-batches and ranks.  rows: those with such a token.
        """
        return {"tokens": tokens, "rows": rows, "constant": rows * settings.longest_reply}[self.mean]


def bounded_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """[T] exp(logp - logp_old), finite for finite inputs."""
    return bounded_exp(logp - logp_old)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def truncated_weight(logp_numerator: Tensor, logp_denominator: Tensor, truncation: float) -> Tensor:
    """[T] min(exp(numerator - denominator), C) without gradient (paper appendix D)."""
    difference = (logp_numerator - logp_denominator).detach()
    return difference.clamp(max=LARGEST_LOG_RATIO).exp().clamp(max=truncation)


def behaviour_logp(terms: TokenTerms) -> Tensor:
    """[T] log-probs that the engine reported; π_prox stands in where it reported none."""
    return torch.where(terms.known, terms.logp_behaviour, terms.logp_prox)


def sampling_logp(terms: TokenTerms) -> Tensor:
    """[T] log π_θold, θ_old being the version that sampled the token.

    Of the version the step starts from that is π_prox, in the learner's own numerics. Older ones the learner no longer
    holds, and the engine's report stands for them; π_prox where it reported none.
    """
    return torch.where(terms.current, terms.logp_prox, behaviour_logp(terms))


def row_sampling_logp(terms: TokenTerms) -> Tensor:
    """[T] the same for ratios of whole rows, where errors add up: an approximate report counts as none."""
    return torch.where(terms.nucleus, terms.logp_prox, sampling_logp(terms))


def row_means(values: Tensor, terms: TokenTerms) -> Tensor:
    """[T] → [N] mean over each row's loss-bearing tokens; 0 for a row without any."""
    return _row_sums(values, terms) / _row_tokens(terms)


def per_token(rows: Tensor, terms: TokenTerms) -> Tensor:
    """[N] → [T] the value of each token's row."""
    return rows.repeat_interleave(terms.lengths)


def row_share(terms: TokenTerms) -> Tensor:
    """[T] one over the loss-bearing tokens of the token's row: sums of shares are means over rows."""
    return per_token(1.0 / _row_tokens(terms), terms)


def clip(ratio: Tensor, advantages: Tensor, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    """min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A), and where the clipped term was the smaller one; any shape."""
    plain = ratio * advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    return torch.minimum(plain, clipped), clipped < plain


def clipped_surrogate(terms: TokenTerms, ratio: Tensor, weight: Tensor, settings: ObjectiveSettings) -> ObjectiveSums:
    """Sums of w·(min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A) - β·KL) over loss-bearing tokens."""
    gain, clipped = clip(ratio, terms.advantages, settings)
    return token_sums(terms, settings, gain, ratio=ratio, dropped=clipped, weight=weight)


def token_sums(
    terms: TokenTerms,
    settings: ObjectiveSettings,
    gain: Tensor,
    *,
    ratio: Tensor,
    dropped: Tensor,
    weight: Tensor | None = None,
    share: Tensor | None = None,
) -> ObjectiveSums:
    """Sums of share·w·(gain - β·KL) over loss-bearing tokens.

    All [T]. weight: w, without gradient; None for 1.  share: of the token in its row, None for 1: tokens count alike.
    """
    weight = torch.ones_like(gain) if weight is None else weight
    if terms.logp_ref is None:
        kl = torch.zeros_like(gain)
    else:
        kl = kl_per_token(terms.logp, terms.logp_ref, settings.kl_estimator)
        gain = gain - settings.kl_beta * kl
    gain = weight * gain
    return ObjectiveSums(
        loss=-_total(gain if share is None else share * gain, terms),
        ratio=_total(ratio.detach(), terms),
        clipped=_total(dropped.to(gain.dtype), terms),
        weight=_total(weight, terms),
        kl=_total(kl.detach(), terms),
    )


def _total(values: Tensor, terms: TokenTerms) -> Tensor:
    return _masked(values, terms).sum()


def _masked(values: Tensor, terms: TokenTerms) -> Tensor:
    # where, not a product: what stands at a masked position must not matter even when it is not finite
    return torch.where(terms.mask, values, torch.zeros_like(values))


def _row_sums(values: Tensor, terms: TokenTerms) -> Tensor:
    # segments, not index_add, whose order of addition is not fixed on a GPU
    return torch.segment_reduce(_masked(values, terms), "sum", lengths=terms.lengths)


def _row_tokens(terms: TokenTerms) -> Tensor:
    """[N] loss-bearing tokens of each row, at least 1."""
    return _row_sums(torch.ones_like(terms.logp_prox), terms).clamp(min=1.0)
