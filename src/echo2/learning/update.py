"""The optimizer updates of one training step.

Invariant: an update divides the summed loss by the loss-bearing tokens of all its micro-batches on all ranks (field
report C04). One without such tokens, or with a gradient that is not finite, changes neither weights nor optimizer, on
whatever rank, and is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echo2.learning.batch import TrainingBatch, minibatches
from echo2.learning.micro_batches import micro_batches
from echo2.learning.objectives import Objective, ObjectiveSettings, ObjectiveSums, TokenTerms
from echo2.learning.packing import MicroBatch
from echo2.learning.policy_model import PolicyModel, whole
from echo2.learning.ranks import ONE_RANK, Ranks, totals


@dataclass(frozen=True)
class UpdateSettings:
    objective: Objective
    objective_settings: ObjectiveSettings
    updates: int
    """Per training step."""
    micro_batch_tokens: int
    grad_clip: float
    """Largest gradient norm; 0: no limit."""


@dataclass
class Tally:
    """Sums over the tokens of the updates that were done, and where the time went."""

    sums: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def merge(self, other: Tally) -> None:
        self.add(**other.sums)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began_s

    def mean(self, name: str, over: str = "tokens") -> float:
        return self.sums.get(name, 0.0) / max(self.sums.get(over, 0.0), 1.0)


@dataclass(frozen=True)
class _Minibatch:
    """One update's micro-batches with the log-probs that must be known before any update of the step."""

    micros: list[MicroBatch]
    """This rank's"""
    tokens: int
    """Loss-bearing ones of the whole update, over all ranks"""
    prox: list[Tensor] | None
    """[T] each; None for the first update: its own forward pass is under π_prox"""
    ref: list[Tensor] | None


def run_updates(
    batch: TrainingBatch,
    policy: PolicyModel,
    reference: PolicyModel | None,
    optimizer: torch.optim.Optimizer,
    settings: UpdateSettings,
    ranks: Ranks = ONE_RANK,
) -> dict[str, float]:
    """One training step on the batch, which every rank holds whole; returns its statistics, all finite."""
    tally = Tally()
    work = _prepare(batch, policy, reference, settings, tally, ranks)
    done = empty = not_finite = 0
    norms: list[float] = []
    for minibatch in work:
        if minibatch.tokens == 0:
            empty += 1
            continue
        optimizer.zero_grad(set_to_none=True)
        own = Tally()
        with tally.clock("update_s"):
            for index in range(len(minibatch.micros)):
                _accumulate(minibatch, index, policy, settings, own)
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
    statistics = _statistics(tally, norms)
    statistics |= {"updates": done, "updates_empty": empty, "updates_not_finite": not_finite}
    return statistics


def _prepare(
    batch: TrainingBatch,
    policy: PolicyModel,
    reference: PolicyModel | None,
    settings: UpdateSettings,
    tally: Tally,
    ranks: Ranks,
) -> list[_Minibatch]:
    """Pack the minibatches and compute, before the first update, what the later ones compare with."""
    work: list[_Minibatch] = []
    is_first = True
    for rows in minibatches(batch.rows, settings.updates):
        with tally.clock("pack_s"):
            micros = micro_batches(
                policy, rows, settings.micro_batch_tokens, ranks, share_prefixes=policy.shares_prefixes
            )
            tally.add(padded_tokens=sum(micro.tokens.numel() for micro in micros))
        with tally.clock("prox_s"):
            prox = None if is_first and micros else _without_gradient(policy, micros)
        is_first = is_first and not micros
        with tally.clock("reference_s"):
            ref = None if reference is None else _without_gradient(reference, micros)
        work.append(_Minibatch(micros, sum(row.targets for row in rows), prox, ref))
    return work


@torch.no_grad()
def _without_gradient(policy: PolicyModel, micros: Sequence[MicroBatch]) -> list[Tensor]:
    return [policy.logprobs(micro)[0] for micro in micros]


def _accumulate(minibatch: _Minibatch, index: int, policy: PolicyModel, settings: UpdateSettings, own: Tally) -> None:
    """Add one micro-batch's gradient and statistics."""
    micro = minibatch.micros[index]
    logp, entropy = policy.logprobs(micro)
    prox = logp.detach() if minibatch.prox is None else minibatch.prox[index]
    terms = TokenTerms(
        logp=logp,
        logp_prox=prox,
        logp_behaviour=micro.behaviour,
        known=micro.known,
        current=micro.current,
        logp_ref=None if minibatch.ref is None else minibatch.ref[index],
        advantages=micro.advantages,
        mask=torch.ones_like(micro.known),
    )
    sums = settings.objective(terms, settings.objective_settings)
    (sums.loss / minibatch.tokens).backward()  # type: ignore[no-untyped-call]
    _count(own, micro, terms, sums, entropy)
    if minibatch.prox is None:
        own.add(first_ratio=float(sums.ratio), first_tokens=micro.targets)


def _count(own: Tally, micro: MicroBatch, terms: TokenTerms, sums: ObjectiveSums, entropy: Tensor) -> None:
    compared = micro.known & micro.current
    drift = (terms.logp_prox - micro.behaviour).clamp(-20.0, 20.0).exp()
    own.add(
        tokens=micro.targets,
        loss=float(sums.loss.detach()),
        ratio=float(sums.ratio),
        clipped=float(sums.clipped),
        weight=float(sums.weight),
        kl=float(sums.kl),
        entropy=float(entropy.sum()),
        unweighted=float((~micro.known).sum()),
        approximate=float((micro.nucleus & micro.known).sum()),
        sampler=float(torch.where(compared, drift, 0.0).sum()),
        compared=float(compared.sum()),
    )


def _clip(policy: PolicyModel, largest: float) -> float | None:
    """Clip the gradient in place; its norm before that, None when it is not finite."""
    parameters = [p for p in policy.parameters().values() if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if not bool(torch.isfinite(norm)):
        return None
    if largest > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return float(norm)


def _statistics(tally: Tally, norms: Sequence[float]) -> dict[str, float]:
    statistics = {
        "trainable_tokens": tally.sums.get("tokens", 0.0),
        "padded_tokens": tally.sums.get("padded_tokens", 0.0),
        "loss": tally.mean("loss"),
        "entropy": tally.mean("entropy"),
        "kl": tally.mean("kl"),
        "clip_share": tally.mean("clipped"),
        "ratio_mean": tally.mean("ratio"),
        "ratio_first": tally.mean("first_ratio", "first_tokens"),
        "weight_mean": tally.mean("weight"),
        "unweighted_share": tally.mean("unweighted"),
        "approximate_weight_share": tally.mean("approximate"),
        "grad_norm": sum(norms) / max(len(norms), 1),
    }
    if tally.sums.get("compared", 0.0) > 0:
        # π_prox / π_behaviour of tokens sampled under this very version: 1 when learner and engine agree (C06).
        statistics["sampler_ratio"] = tally.mean("sampler", "compared")
    return statistics | tally.seconds
