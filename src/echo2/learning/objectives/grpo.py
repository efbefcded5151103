"""GRPO with a proximal policy and a truncated importance weight.

    ρ = π_θ / π_prox        w = min(π_prox / π_behaviour, C)
    J = mean over tokens of w·( min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A) - β·KL(π_θ ‖ π_ref) )

Papers: GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3), the proximal policy of decoupled PPO (arXiv 2110.00641) as AReaL
uses it (arXiv 2505.24298), truncated weight as in ECHO-2's appendix D.

Deviations: the mean runs over the loss-bearing tokens of the update, not over each trajectory first; ε may be
asymmetric (DAPO, arXiv 2503.14476); w is per token, detached, and 1 where the engine reported no usable log-prob; the
KL term is weighted by w like the rest; tokens of zero-variance groups carry it and count in the mean unless
``learning.zero_variance`` drops them; |log ρ| is clamped to 20.
"""

from __future__ import annotations

from echo2.learning.objectives.terms import (
    ObjectiveSettings,
    ObjectiveSums,
    TokenTerms,
    behaviour_logp,
    bounded_ratio,
    clipped_surrogate,
    truncated_weight,
)


def grpo(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    """See the module; the first ρ of a step is exactly 1 up to rounding."""
    weight = truncated_weight(terms.logp_prox, behaviour_logp(terms), settings.truncation)
    return clipped_surrogate(terms, bounded_ratio(terms.logp, terms.logp_prox), weight, settings)
