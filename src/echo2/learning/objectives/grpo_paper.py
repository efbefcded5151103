"""The ECHO-2 paper's own objective (arXiv 2602.02192, §4.4 and appendix D): clipped against the *sampling* version.

    ρ = π_θ / π_θold        w = min(π_learner(θ_old) / π_sampler(θ_old), C)
    J = w·( min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A) - β·KL(π_θ ‖ π_ref) )

θ_old is the version that sampled the token. For tokens of the version the step starts from, the learner has
π_learner(θ_old) = π_prox and corrects the sampler's numerics by w. For older ones it no longer holds θ_old: the
sampler's own log-prob stands for log π_θold, and w = 1. Where the engine reported none, π_prox stands in, and w = 1.

Deviations: the mean runs over the loss-bearing tokens of the update; ε may be asymmetric; |log ρ| is clamped to 20; the
KL term's estimator is configured, the paper names none.
"""

from __future__ import annotations

from echo2.learning.objectives.terms import (
    ObjectiveSettings,
    ObjectiveSums,
    TokenTerms,
    behaviour_logp,
    bounded_ratio,
    clipped_surrogate,
    sampling_logp,
    truncated_weight,
)


def grpo_paper(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    """See the module; stale tokens start a step with ρ ≠ 1, and may be clipped from the beginning."""
    old = sampling_logp(terms)
    weight = truncated_weight(old, behaviour_logp(terms), settings.truncation)
    return clipped_surrogate(terms, bounded_ratio(terms.logp, old), weight, settings)
