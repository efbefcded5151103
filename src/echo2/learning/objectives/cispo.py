"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): the importance weight is clipped, no token loses its gradient.

    r = π_θ / π_θold
    J = mean over tokens of ( sg(min(r, 1 + ε_high))·A·log π_θ - β·KL )        sg: no gradient

Checked against the documentation of ms-swift, Tinker and a slime fork. The paper has no lower clip in effect. Not
found: its ε_high; 3 makes the largest weight 4, Tinker's default.

Deviations: no lower clip exists; θ_old is the version that sampled the token, π_prox where that is the step's own or
the engine reported no log-prob. The paper has no KL term.
"""

from __future__ import annotations

from echo2.learning.objectives.terms import (
    ObjectiveSettings,
    ObjectiveSums,
    TokenTerms,
    bounded_ratio,
    sampling_logp,
    token_sums,
)


def cispo(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    """``clipped`` counts weights at their limit, whose tokens are trained on nevertheless."""
    ratio = bounded_ratio(terms.logp, sampling_logp(terms)).detach()
    weight = ratio.clamp(max=1 + settings.clip_high)
    gain = weight * terms.advantages * terms.logp
    return token_sums(terms, settings, gain, ratio=ratio, dropped=weight < ratio)
