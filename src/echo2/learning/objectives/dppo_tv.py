"""DPPO with the binary estimate of total variation (arXiv 2602.04879).

    r = π_θ / μ             M = 0 where A > 0 and π_θ - μ > δ_high, or A ≤ 0 and π_θ - μ < -δ_low; else 1
    J = mean over tokens of ( M·sg(min(r, C))·A·log π_θ - β·KL )        sg: no gradient
    δ = ``clip_low``, ``clip_high``, differences of probabilities; C = 10

A ratio says little of a rare token: from 1e-5 to 1e-4 it is 10, and hardly any probability has moved. The difference of
the sampled token's probability is a lower bound of the distributions' total variation.

Checked against the authors' code (sail-sg/Stable-RL, `dppo_binary_tv`, C = 10), TRL's experimental trainer and
prime-rl's default loss, which has the same mask and δ = 0.2. Not verified: the δ of the paper's own runs.

Deviations: μ is what the engine reported, also for the step's own version, as the paper anchors it; π_prox stands in
where it reported nothing.
"""

from __future__ import annotations

import torch

from echo2.learning.objectives.terms import (
    ObjectiveSettings,
    ObjectiveSums,
    TokenTerms,
    behaviour_logp,
    bounded_ratio,
    token_sums,
)


def dppo_tv(terms: TokenTerms, settings: ObjectiveSettings) -> ObjectiveSums:
    logp, anchor = terms.logp.detach(), behaviour_logp(terms)
    moved = logp.clamp(max=0.0).exp() - anchor.clamp(max=0.0).exp()
    outside = torch.where(terms.advantages > 0, moved > settings.clip_high, moved < -settings.clip_low)
    ratio = bounded_ratio(logp, anchor)
    factor = torch.where(outside, torch.zeros_like(ratio), ratio.clamp(max=settings.truncation))
    gain = factor * terms.advantages * terms.logp
    return token_sums(terms, settings, gain, ratio=ratio, dropped=outside)
