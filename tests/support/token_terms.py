"""Token terms made by hand, and what a whole update makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from echo2.learning.objectives import OBJECTIVES, Objective, ObjectiveSettings, TokenTerms


@dataclass(frozen=True)
class Row:
    """One row, a value per token; what is not given is neutral: log-probs of -1 under every policy, advantage 1."""

    logp: Sequence[float] = (-1.0,)
    prox: Sequence[float] | None = None
    behaviour: Sequence[float] | None = None
    ref: Sequence[float] | None = None
    mask: Sequence[bool] | None = None
    advantage: float = 1.0
    known: bool = True
    current: bool = False
    nucleus: bool = False
    group: int = 0


def terms_of(rows: Sequence[Row], *, groups: int | None = None) -> TokenTerms:
    def tokens(values: list[Sequence[Any]]) -> Tensor:
        return torch.tensor([value for row in values for value in row])

    def same(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(lengths)

    lengths = torch.tensor([len(row.logp) for row in rows])
    has_reference = any(row.ref is not None for row in rows)
    return TokenTerms(
        logp=tokens([row.logp for row in rows]).requires_grad_(),
        logp_prox=tokens([row.logp if row.prox is None else row.prox for row in rows]),
        logp_behaviour=tokens([row.logp if row.behaviour is None else row.behaviour for row in rows]),
        known=same([row.known for row in rows], torch.bool),
        current=same([row.current for row in rows], torch.bool),
        nucleus=same([row.nucleus for row in rows], torch.bool),
        logp_ref=tokens([row.logp if row.ref is None else row.ref for row in rows]) if has_reference else None,
        advantages=same([row.advantage for row in rows], torch.float32),
        mask=tokens([[True] * len(row.logp) if row.mask is None else row.mask for row in rows]),
        lengths=lengths,
        group=torch.tensor([row.group for row in rows]),
        groups=1 + max(row.group for row in rows) if groups is None else groups,
    )


@dataclass(frozen=True)
class Outcome:
    loss: float
    gradients: list[list[float]]
    """By row, per token."""
    sums: dict[str, float]


def update(
    objective: str | Objective,
    rows: Sequence[Row],
    settings: ObjectiveSettings | None = None,
    *,
    parts: Sequence[Sequence[int]] | None = None,
) -> Outcome:
    """One update over ``rows``, in micro-batches of the rows with the numbers in ``parts``; by default all in one."""
    made = OBJECTIVES[objective] if isinstance(objective, str) else objective
    given = settings or ObjectiveSettings()
    parts = parts or [range(len(rows))]
    groups = 1 + max(row.group for row in rows)
    micros = [terms_of([rows[i] for i in part], groups=groups) for part in parts]
    with torch.no_grad():
        found = [made.statistics(replace(m, logp=m.logp_prox), given) for m in micros if made.statistics is not None]
    whole = torch.stack(found).sum(0) if found else None
    normaliser = made.normaliser(sum(m.mask.numel() for m in micros), len(rows), given)
    loss, sums = 0.0, dict.fromkeys(("ratio", "clipped", "weight", "kl"), 0.0)
    gradients: list[list[float]] = [[] for _ in rows]
    for part, micro in zip(parts, micros, strict=True):
        told = made.sums(replace(micro, whole=whole), given)
        (told.loss / normaliser).backward()
        loss += float(told.loss.detach()) / normaliser
        for name in sums:
            sums[name] += float(getattr(told, name))
        assert micro.logp.grad is not None
        for i, gradient in zip(part, micro.logp.grad.split(micro.lengths.tolist()), strict=True):
            gradients[i] = gradient.tolist()
    return Outcome(loss, gradients, sums)
