"""Dr. GRPO (arXiv 2503.20783): no division by the group's standard deviation, none by a reply's own length.

    A = r - mean of the group
    J = 1/(N·L) · Σ over rows and tokens of w·( min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A) - β·KL )

N: rows of the update. L: a constant, here ``rollout.max_new_tokens``, so that long and short replies weigh alike per
token in every update, however long the update's replies happen to be.

Checked against the paper's equations as public notes retell them, and the `dr_grpo` loss of a trainer built on TRL
(HanlardResearch/HeteroRL_GEPO), which divides by rows times the completion limit. Not read: the authors' own code.

Deviations: ρ against π_prox and w as in ``grpo``; rows without a loss-bearing token are not counted in N; in games of
several turns L is the limit of one reply. The advantage without the division is ``learning.advantage_scale = "none"``,
the default of this objective.
"""

from __future__ import annotations

from echo2.learning.objectives.grpo import grpo
from echo2.learning.objectives.terms import ObjectiveSettings, ObjectiveSums, TokenTerms


def dr_grpo(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    """The sums of ``grpo``; what differs is what they are divided by, and the advantages."""
    return grpo(terms, settings)
