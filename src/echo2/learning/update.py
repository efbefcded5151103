"""The optimizer updates of one training step.

Invariant: an update divides the summed loss by a normaliser of all its micro-batches on all ranks, which the objective
names and tokens and rows decide (field report C04). An update without loss-bearing tokens, or with a gradient that is
not finite, changes neither weights nor optimizer, on whatever rank, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from echo2.learning.batch import TrainingBatch, TrainingRow, minibatches
from echo2.learning.micro_batches import micro_batches
from echo2.learning.objectives import Objective, ObjectiveSettings, TokenTerms
from echo2.learning.packing import MicroBatch
from echo2.learning.policy_model import PolicyModel, Scores, whole
from echo2.learning.ranks import ONE_RANK, Ranks, total, totals
from echo2.learning.shortage import Budget, until_it_fits
from echo2.learning.tally import Tally, count, speed, statistics_of

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateSettings:
    objective: Objective
    objective_settings: ObjectiveSettings
    updates: int
    """Per training step."""
    micro_batch_tokens: int
    grad_clip: float
    """Largest gradient norm; 0: no limit."""


@dataclass(frozen=True)
class _Minibatch:
    """One update's micro-batches with the log-probs that must be known before any update of the step."""

    members: tuple[TrainingRow, ...]
    """The update's rows, of all ranks"""
    micros: list[MicroBatch]
    """This rank's"""
    budget: int
    """Tokens that the micro-batches were packed for"""
    prox: list[Tensor] | None
    """[T] each; None where the update's own forward pass is under π_prox and nothing must be known before it"""
    ref: list[Tensor] | None
    is_first: bool
    """Nothing of the step was trained before it, so its ρ is 1."""
    groups: int
    """Of the batch."""

    @property
    def tokens(self) -> int:
        """Loss-bearing ones of the whole update, over all ranks"""
        return sum(row.targets for row in self.members)

    @property
    def rows(self) -> int:
        """Those with such a token, likewise"""
        return sum(row.targets > 0 for row in self.members)

    def packed_again(self, micros: list[MicroBatch], budget: int) -> _Minibatch:
        """In other micro-batches, with the same log-probs: the policy may have changed since they were computed."""
        prox, ref = (_dealt(known, self.micros, micros) for known in (self.prox, self.ref))
        return replace(self, micros=micros, budget=budget, prox=prox, ref=ref)

    def terms(self, index: int, logp: Tensor, whole: Tensor | None = None) -> TokenTerms:
        micro = self.micros[index]
        return TokenTerms(
            logp=logp,
            logp_prox=logp.detach() if self.prox is None else self.prox[index],
            logp_behaviour=micro.behaviour,
            known=micro.known,
            current=micro.current,
            nucleus=micro.nucleus,
            logp_ref=None if self.ref is None else self.ref[index],
            advantages=micro.advantages,
            mask=torch.ones_like(micro.known),
            lengths=micro.lengths,
            group=micro.group,
            groups=self.groups,
            whole=whole,
        )


def _dealt(known: list[Tensor] | None, old: Sequence[MicroBatch], new: Sequence[MicroBatch]) -> list[Tensor] | None:
    """[T] values of the old micro-batches' targets, as the new ones have the same targets."""
    if known is None:
        return None
    of_row: dict[int, Tensor] = {}
    for micro, values in zip(old, known, strict=True):
        if micro.targets:
            of_row |= zip(map(id, micro.members), torch.split(values, micro.lengths.tolist()), strict=True)
    nothing = known[0].new_zeros(0)
    return [torch.cat([of_row.get(id(row), nothing) for row in micro.members]) for micro in new]


@dataclass(frozen=True)
class _Step:
    """What all updates of one training step have in common."""

    policy: PolicyModel
    reference: Scores | None
    settings: UpdateSettings
    budget: Budget
    ranks: Ranks
    tally: Tally

    def packed(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        with self.tally.clock("pack_s"):
            return micro_batches(self.policy, rows, self.budget, self.ranks, share_prefixes=self.policy.shares_prefixes)

    def until_it_fits(self, work: Callable[[], T]) -> T:
        return until_it_fits(work, self.budget, self._break_off)

    def _break_off(self) -> None:
        for model in (self.policy, self.reference):
            if model is not None:
                model.break_off()


def run_updates(
    batch: TrainingBatch,
    policy: PolicyModel,
    reference: Scores | None,
    optimizer: torch.optim.Optimizer,
    settings: UpdateSettings,
    ranks: Ranks = ONE_RANK,
    budget: Budget | None = None,
) -> dict[str, float]:
    """One training step on the batch, which every rank holds whole; returns its statistics, all finite.

    budget: of micro-batches, lowered where memory is short; None for that of the settings.
    Raises UserError for a trajectory that does not fit into memory alone.
    """
    budget = budget or Budget(settings.micro_batch_tokens)
    tally, splits = Tally(policy.device), budget.splits
    step = _Step(policy, reference, settings, budget, ranks, tally)
    work = _prepare(batch, step)
    done = empty = not_finite = 0
    norms: list[float] = []
    for minibatch in work:
        if minibatch.tokens == 0:
            empty += 1
            continue
        optimizer.zero_grad(set_to_none=True)
        own = step.until_it_fits(lambda minibatch=minibatch: _accumulated(minibatch, step))  # type: ignore[misc]
        with tally.clock("optimizer_s"):
            norm = _clip(policy, settings.grad_clip)
            if norm is None:
                not_finite += 1
            else:
                optimizer.step()
                tally.merge(own)
                norms.append(norm)
                done += 1
        optimizer.zero_grad(set_to_none=True)
    tally.sums = totals(ranks, tally.sums)
    statistics = statistics_of(tally, norms) | speed(tally, policy.peak_flops * ranks.world)
    statistics |= {"updates": done, "updates_empty": empty, "updates_not_finite": not_finite}
    return statistics | {"memory_splits": budget.splits - splits, "micro_batch_tokens": budget.tokens}


def _prepare(batch: TrainingBatch, step: _Step) -> list[_Minibatch]:
    """Pack the minibatches and compute, before the first update, what the later ones compare with."""
    work: list[_Minibatch] = []
    for rows in minibatches(batch.rows, step.settings.updates):
        is_first = not any(minibatch.micros for minibatch in work)
        made = step.until_it_fits(lambda rows=rows, is_first=is_first: _prepared(rows, is_first, batch.groups, step))  # type: ignore[misc]
        passes = step.policy.passes_of_update + (made.prox is not None) + (made.ref is not None)
        step.tally.add(
            flops=step.policy.flops.forward(made.micros) * passes,
            padded_tokens=sum(micro.tokens.numel() for micro in made.micros),
        )
        work.append(made)
    return work


def _prepared(rows: tuple[TrainingRow, ...], is_first: bool, groups: int, step: _Step) -> _Minibatch:
    micros = step.packed(rows)
    first = is_first and bool(micros)
    with step.tally.clock("prox_s"):
        needs_prox = not first or step.settings.objective.statistics is not None
        prox = _without_gradient(step.policy, micros, step.ranks) if needs_prox else None
    with step.tally.clock("reference_s"):
        ref = None if step.reference is None else _without_gradient(step.reference, micros, step.ranks)
    return _Minibatch(rows, micros, step.budget.tokens, prox, ref, first, groups)


@torch.no_grad()
def _without_gradient(policy: Scores, micros: Sequence[MicroBatch], ranks: Ranks) -> list[Tensor]:
    found: list[Tensor] = []
    for micro in micros:
        with policy.watch.noticing():
            found.append(policy.logprobs(micro)[0])
        policy.watch.agree(ranks, micro)
    return found


def _accumulated(minibatch: _Minibatch, step: _Step) -> Tally:
    """Add the gradient of all micro-batches; their statistics. Raises TooLarge, and then the gradient is worthless."""
    if minibatch.budget > step.budget.tokens:
        minibatch = minibatch.packed_again(step.packed(minibatch.members), step.budget.tokens)
    own = Tally(step.policy.device)
    with step.tally.clock("update_s"):
        _accumulate(minibatch, step.policy, step.settings, own, step.ranks)
    return own


def _accumulate(minibatch: _Minibatch, policy: PolicyModel, settings: UpdateSettings, own: Tally, ranks: Ranks) -> None:
    objective, given = settings.objective, settings.objective_settings
    normaliser = objective.normaliser(minibatch.tokens, minibatch.rows, given)
    whole = _whole(minibatch, settings, ranks)
    own.add(normaliser=normaliser / ranks.world)
    for index, micro in enumerate(minibatch.micros):
        with policy.watch.noticing():
            logp, entropy = policy.logprobs(micro)
            terms = minibatch.terms(index, logp, whole)
            sums = objective.sums(terms, given)
        policy.watch.agree(ranks, micro)
        with policy.watch.noticing():
            (sums.loss / normaliser).backward()  # type: ignore[no-untyped-call]
            count(own, micro, terms, sums, entropy)
            if minibatch.is_first:
                own.add(first_ratio=float(sums.ratio), first_tokens=micro.targets)
        policy.watch.agree(ranks, micro)


@torch.no_grad()
def _whole(minibatch: _Minibatch, settings: UpdateSettings, ranks: Ranks) -> Tensor | None:
    """[K] what the objective must know of the whole update: plain sums, added over micro-batches and ranks."""
    statistics = settings.objective.statistics
    if statistics is None or minibatch.prox is None:
        return None
    parts = [
        statistics(minibatch.terms(index, prox), settings.objective_settings)
        for index, prox in enumerate(minibatch.prox)
    ]
    return total(ranks, torch.stack(parts).sum(0))


def _clip(policy: PolicyModel, largest: float) -> float | None:
    """Clip the gradient in place; its norm before that, None when it is not finite."""
    parameters = [p for p in policy.parameters().values() if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if not bool(torch.isfinite(norm)):
        return None
    if largest > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return float(norm)
