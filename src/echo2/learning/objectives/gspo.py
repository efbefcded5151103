"""GSPO (arXiv 2507.18071): ratio, clip and mean of whole replies.

    s = (π_θ(y) / π_θold(y))^(1/|y|) = exp( mean over tokens of log(π_θ / π_θold) )
    J = mean over rows of ( min(sA, clip(s, 1 - ε_low, 1 + ε_high)A) - β·mean over tokens of KL )
    ε_low = 3e-4, ε_high = 4e-4 (section 5.1 of v2)

Checked against TRL's documentation, AReaL's sequence-level ratio and a public review of the paper.

Deviations: θ_old is the version that sampled the row, π_prox where that is the step's own; for rows with top-p below 1,
or without log-probs, π_prox stands for it, so approximate log-probs never enter s. |log s| is clamped to 20. The paper
has no KL term. Meant for fresh data: at this clip range most stale rows are outside from the beginning.
"""

from __future__ import annotations

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


def gspo(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    ratio = per_token(bounded_exp(row_means(terms.logp - row_sampling_logp(terms), terms)), terms)
    gain, clipped = clip(ratio, terms.advantages, settings)
    return token_sums(terms, settings, gain, ratio=ratio, dropped=clipped, share=row_share(terms))
