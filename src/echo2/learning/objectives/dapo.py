"""DAPO (arXiv 2503.14476): a wider upper clip, a mean over tokens, no groups without signal, no noise of cut replies.

    J = mean over tokens of w·( min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A) - β·KL )        ε_low = 0.2, ε_high = 0.28

Its four parts are here: clip-higher in the defaults of ``clip_low`` and ``clip_high``; the token mean, which all token
objectives have; ``learning.zero_variance`` defaults to "drop"; ``learning.overlong`` defaults to "mask", the paper's
overlong filtering. Sampling further groups instead of those without signal is ``buffer.drop_zero_variance``.

Checked against verl's recipe and ms-swift's documentation of it.

Deviations: ρ against π_prox and w as in ``grpo``; no soft overlong punishment (the paper's other way of treating cut
replies, a length-dependent reward): a task's reward is the task's; β is 0 by default and may be set.
"""

from __future__ import annotations

from echo2.learning.objectives.grpo import grpo
from echo2.learning.objectives.terms import ObjectiveSettings, ObjectiveSums, TokenTerms


def dapo(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    """The sums of ``grpo`` under other defaults."""
    return grpo(terms, settings)
