"""GEPO (arXiv 2508.17850): the denominator of a reply's ratio is an expectation over its group.

    p = π_θ(y)^(1/|y|)      q = π_θold(y)^(1/|y|)      Q = Σq² / Σq over the group      s = p / Q
    J = mean over rows of ( min(sA, clip(s, 1 - ε_low, 1 + ε_high)A) - β·mean over tokens of KL )

Q is the mean of q under the group's own, normalised q: one improbable reply no longer has a huge ratio. So s ≠ 1 on
fresh data as well, except where all replies of a group are equally probable.

Checked against the authors' code (HanlardResearch/HeteroRL_GEPO, loss type `gepo`): length-normalised p and q, the clip
around s, the mean over rows. Not found: the clip range of the paper's runs; 0.2 is the trainer's default that the code
builds on.

Deviations: Q runs over the group's rows that carry loss, whatever micro-batches or ranks they are on; the code takes
it over each device's batch. θ_old as in ``gspo``, so that approximate log-probs enter
neither q nor s. Mean log q is clamped to ±100 and |log s| to 20. The code's optional CPPO-KL term is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo2.learning.objectives.terms import (
    ObjectiveSettings,
    ObjectiveSums,
    TokenTerms,
    bounded_exp,
    clip,
    per_token,
    row_means,
    row_sampling_logp,
    row_share,
    token_sums,
)

LARGEST_MEAN_LOGP = 100.0
"""A reply's mean |log q| counts as no more: e^-200 still is a float64. Over a real vocabulary it is below 20."""


def group_moments(terms: TokenTerms, _: ObjectiveSettings) -> Tensor:
    """[2·groups] float64: Σq² of every group, then Σq."""
    mean = row_means(row_sampling_logp(terms), terms).double()
    q = mean.clamp(-LARGEST_MEAN_LOGP, LARGEST_MEAN_LOGP).exp()
    number = torch.arange(terms.groups, device=q.device)[:, None]
    members = (terms.group == number) & (terms.lengths > 0)  # [groups, N]; rows of empty micro-batches have no token
    return torch.cat([(members * q.square()).sum(1), (members * q).sum(1)])


def gepo(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    if terms.whole is None:
        raise ValueError("gepo needs the group moments of the whole update")
    squares, sums = terms.whole[terms.group], terms.whole[terms.groups + terms.group]
    log_expected = (squares.log() - sums.log()).to(terms.logp.dtype)
    ratio = per_token(bounded_exp(row_means(terms.logp, terms) - log_expected), terms)
    gain, clipped = clip(ratio, terms.advantages, settings)
    return token_sums(terms, settings, gain, ratio=ratio, dropped=clipped, share=row_share(terms))
