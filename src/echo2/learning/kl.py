"""Per-token estimators of KL(policy ‖ reference) from log-probs of sampled tokens (J. Schulman, "Approximating KL
divergence", 2020).

Invariant: value and gradient are finite for every finite input, in any floating type. Computed in at least float32.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

LINEAR_BEYOND = 10.0
"""Log-ratio beyond which exp is continued by its tangent: e¹⁰ = 22026 still fits the gradient of a float16. Clipping
the value instead would give 0·inf = NaN as gradient (field report C08)."""

LARGEST_LOG_RATIO = 1e6
"""Log-ratios are clamped here: no token of a real vocabulary is that improbable, and squares stay finite."""


def kl_per_token(logp: Tensor, logp_ref: Tensor, estimator: Estimator) -> Tensor:
    """[T], [T] log-probs under policy and reference → [T] estimates, float32 (float64 for float64 inputs).

    With d = log π_ref - log π:  k1 = -d (unbiased, signed),  k2 = d²/2,  k3 = e^d - 1 - d (unbiased, not negative).
    """
    wide = torch.promote_types(torch.promote_types(logp.dtype, logp_ref.dtype), torch.float32)
    d = (logp_ref.to(wide) - logp.to(wide)).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    near = d.clamp(max=LINEAR_BEYOND)
    return torch.expm1(near) + near.exp().detach() * (d - near) - d
