"""M2PO (arXiv 2510.01161): the second moment of the log-ratio is the trust region, over the whole update.

    m = (log(π_prox / π_θold))²        M = 0 for the tokens of largest m, so many that the mean m of the rest is ≤ τ
    J = mean over tokens of ( M·r·A - β·KL ),  r = π_θ / π_θold        τ = 0.04

No ratio is clipped: stale data stay in, and only what lies far outside goes.

Checked against AReaL's documentation and code, which mask over all tokens as here, and the authors' code
(Infini-AI-Lab/M2PO). The latter differs: only tokens that the step would push further out count (A > 0 with r > 1,
A < 0 with r < 1), and the threshold becomes one clip range, never narrower than 0.7 to 1.5. Not verified: which of the
two the paper's own text describes.

Deviations: the mask is found once per step, at π_prox; the sums behind it are kept in bins 1.4 % wide, so that they can
be added over micro-batches and ranks, and up to one bin more than necessary is masked; θ_old is the version that
sampled the token, so tokens of the step's own version have m = 0; tokens without a log-prob are neither counted nor
masked; |log r| is clamped to 20. The KL term holds for masked tokens too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo2.learning.objectives.terms import (
    LARGEST_LOG_RATIO,
    ObjectiveSettings,
    ObjectiveSums,
    TokenTerms,
    bounded_ratio,
    sampling_logp,
    token_sums,
)

BINS_PER_OCTAVE = 50
LOWEST_OCTAVE = -60
OCTAVES = 70
"""m from 2^-60, the square of what rounding leaves, to 2^10, above the square of the largest log-ratio."""
BINS = OCTAVES * BINS_PER_OCTAVE


def moments(terms: TokenTerms, _: ObjectiveSettings) -> Tensor:
    """[2·BINS] float64: the number of tokens by m, then their sum of m."""
    m, place = _second_moments(terms)
    counted = terms.mask & terms.known
    # On the CPU, where the order of addition is fixed.
    m, place = m[counted].cpu(), place[counted].cpu()
    counts = torch.bincount(place, minlength=BINS).double()
    sums = torch.bincount(place, weights=m, minlength=BINS)
    return torch.cat([counts, sums]).to(terms.logp_prox.device)


def m2po(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    if terms.whole is None:
        raise ValueError("m2po needs the moments of the whole update")
    _, place = _second_moments(terms)
    dropped = terms.known & (place >= _first_masked(terms.whole, settings.second_moment))
    ratio = bounded_ratio(terms.logp, sampling_logp(terms))
    gain = torch.where(dropped, torch.zeros_like(ratio), ratio * terms.advantages)
    return token_sums(terms, settings, gain, ratio=ratio, dropped=dropped)


def _second_moments(terms: TokenTerms) -> tuple[Tensor, Tensor]:
    """[T] float64 m, and [T] int64 the bin it falls into."""
    log_ratio = (terms.logp_prox - sampling_logp(terms)).double().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    m = log_ratio.square()
    octave = m.clamp(min=2.0**LOWEST_OCTAVE).log2() - LOWEST_OCTAVE
    return m, (octave * BINS_PER_OCTAVE).long().clamp(max=BINS - 1)


def _first_masked(whole: Tensor, largest_mean: float) -> Tensor:
    """[] the first bin whose tokens would bring the mean of all up to it above τ; BINS when none does."""
    counts, sums = whole[:BINS].cumsum(0), whole[BINS:].cumsum(0)
    # Bins rise, so the mean does: the first excess is the cut.
    return (sums <= largest_mean * counts).sum()
