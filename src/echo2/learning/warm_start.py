"""Supervised steps on gold replies, for models that know nothing yet.

Invariant: deterministic in the weights and the talks. The result is version 0 and the reference of the KL term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from echo2.errors import UserError
from echo2.learning.batch import TrainingRow
from echo2.learning.micro_batches import micro_batches
from echo2.learning.policy_model import PolicyModel, whole
from echo2.learning.ranks import ONE_RANK, Ranks, totals
from echo2.learning.shortage import Budget, until_it_fits
from echo2.learning.soundness import require_finite

GoldTalk = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Turn by turn: token ids as the engine gets them, and the gold reply's with its end-of-turn token."""

GoldBatches = Callable[[int], Sequence[GoldTalk]]
"""Supervised step → its talks; the same talks for the same step."""

GRAD_NORM = 1.0
"""Largest gradient norm: the first steps of a random model are steep."""


def warm_start(
    policy: PolicyModel,
    gold: GoldBatches,
    *,
    steps: int,
    lr: float,
    micro_batch_tokens: int,
    ranks: Ranks = ONE_RANK,
) -> float:
    """Take ``steps`` AdamW steps on the mean negative log-likelihood of gold reply tokens; return the last loss.

    gold: gives the same talks on every rank.
    Raises UserError for talks in tokens that the model does not have, and where training breaks down.
    """
    parameters = list(policy.parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    loss = float("nan")
    budget = Budget(micro_batch_tokens)
    for step in range(steps):
        rows = [_row(group, talk) for group, talk in enumerate(gold(step))]
        _check_tokens(rows, policy.vocabulary)
        tokens = sum(row.targets for row in rows)
        if tokens == 0:
            raise ValueError(f"supervised step {step} must have a gold reply, it has none")
        loss = until_it_fits(
            lambda rows=rows, tokens=tokens: _accumulated(policy, rows, tokens, budget, ranks),  # type: ignore[misc]
            budget,
            policy.break_off,
        )
        loss = totals(ranks, {"loss": loss})["loss"]
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        torch.nn.utils.clip_grads_with_norm_(parameters, GRAD_NORM, norm)
        if not math.isfinite(loss) or not bool(torch.isfinite(norm)):
            raise UserError(
                f"loss and gradient of a warm start must be finite numbers; at its step {step} they are {loss:g} and"
                f" {float(norm):g}: lower model.warm_start_lr, which is {lr:g}"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if steps:
        require_finite(policy.parameters(), "the weights after the warm start", "lower model.warm_start_lr", ranks)
    return loss


def _accumulated(policy: PolicyModel, rows: Sequence[TrainingRow], tokens: int, budget: Budget, ranks: Ranks) -> float:
    """This rank's part of the mean loss, and its gradient. Raises TooLarge."""
    loss = 0.0
    for micro in micro_batches(policy, rows, budget, ranks, share_prefixes=False):
        with policy.watch.noticing():
            share = -policy.logprobs(micro)[0].sum() / tokens
        policy.watch.agree(ranks, micro)
        with policy.watch.noticing():
            share.backward()  # type: ignore[no-untyped-call]
            loss += float(share.detach())
        policy.watch.agree(ranks, micro)
    return loss


def _check_tokens(rows: Sequence[TrainingRow], vocabulary: int) -> None:
    highest = max((int(row.tokens.max()) for row in rows if row.tokens.size), default=0)
    if highest >= vocabulary:
        raise UserError(
            f"talks of a warm start must be in tokens of the model, which has {vocabulary}, got token {highest}: use "
            'its own tokenizer; with rollout.engine = "scripted" tokens are bytes, so set model.warm_start_steps = 0'
        )


def _row(group: int, talk: GoldTalk) -> TrainingRow:
    tokens = np.asarray([token for fed, reply in talk for token in (*fed, *reply)], np.int64)
    loss = np.asarray([said for fed, reply in talk for said in [False] * len(fed) + [True] * len(reply)], np.bool_)
    loss[:1] = False  # nothing predicts the first token
    return TrainingRow(group, tokens, loss, None, 0.0, 1.0, current=True, nucleus=False)
