"""Weights are numbers.

Invariant: weights that hold NaN or an infinity are never trained on, saved or published: whoever made them so ends with
a sentence first. One pass over them says so, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from echo2.errors import UserError
from echo2.learning.policy_model import own_rows
from echo2.learning.ranks import ONE_RANK, Ranks, everyones


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a floating tensor of which this rank's part is not finite; None when all are."""
    parts = {name: own_rows(value).detach() for name, value in tensors.items() if value.is_floating_point()}
    parts = {name: part for name, part in parts.items() if part.numel()}
    if not parts:
        return None
    # The largest magnitude is NaN or infinite exactly where some element is.
    largest = torch.stack([value.float() for value in torch._foreach_norm(list(parts.values()), ord=torch.inf)])
    bad = torch.nonzero(~torch.isfinite(largest)).flatten().tolist()
    return list(parts)[bad[0]] if bad else None


def require_finite(tensors: Mapping[str, Tensor], what: str, remedy: str, ranks: Ranks = ONE_RANK) -> None:
    """Raises UserError, on all ranks alike.  what: whose weights they are.  remedy: what to change."""
    name = not_finite(tensors)
    if any(everyones(ranks, int(name is not None))):
        raise UserError(f"{what} must be finite numbers, and {name or 'some on another rank'} is not: {remedy}")
