"""The optimizer updates of one training step.

Invariant: an update divides the summed loss by a normaliser of all its micro-batches on all ranks, which the objective
names and tokens and rows decide (field report C04). An update without loss-bearing tokens, or with a gradient that is
not finite, changes neither weights nor optimizer, on whatever rank, and is counted.
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
from echo2.learning.objectives.terms import LARGEST_LOG_RATIO
from echo2.learning.packing import MicroBatch
from echo2.learning.policy_model import PolicyModel, whole
from echo2.learning.ranks import ONE_RANK, Ranks, total, totals

FORWARD_AND_BACKWARD = 3
"""Forward passes that a gradient costs."""


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
    rows: int
    """Those with such a token, likewise"""
    prox: list[Tensor] | None
    """[T] each; None where the update's own forward pass is under π_prox and nothing must be known before it"""
    ref: list[Tensor] | None
    is_first: bool
    """Nothing of the step was trained before it, so its ρ is 1."""
    groups: int
    """Of the batch."""

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
            _accumulate(minibatch, policy, settings, own, ranks)
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
    statistics = _statistics(tally, norms) | _speed(tally, policy.peak_flops * ranks.world)
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
            flops = policy.flops.forward(micros)
            tally.add(padded_tokens=sum(micro.tokens.numel() for micro in micros))
        first = is_first and bool(micros)
        with tally.clock("prox_s"):
            needs_prox = not first or settings.objective.statistics is not None
            prox = _without_gradient(policy, micros) if needs_prox else None
        is_first = is_first and not micros
        with tally.clock("reference_s"):
            ref = None if reference is None else _without_gradient(reference, micros)
        tally.add(flops=flops * (FORWARD_AND_BACKWARD + (prox is not None) + (ref is not None)))
        tokens, counted = sum(row.targets for row in rows), sum(row.targets > 0 for row in rows)
        work.append(_Minibatch(micros, tokens, counted, prox, ref, first, batch.groups))
    return work


@torch.no_grad()
def _without_gradient(policy: PolicyModel, micros: Sequence[MicroBatch]) -> list[Tensor]:
    return [policy.logprobs(micro)[0] for micro in micros]


def _accumulate(minibatch: _Minibatch, policy: PolicyModel, settings: UpdateSettings, own: Tally, ranks: Ranks) -> None:
    """Add the gradient and statistics of all micro-batches."""
    objective, given = settings.objective, settings.objective_settings
    normaliser = objective.normaliser(minibatch.tokens, minibatch.rows, given)
    whole = _whole(minibatch, settings, ranks)
    own.add(normaliser=normaliser / ranks.world)
    for index, micro in enumerate(minibatch.micros):
        logp, entropy = policy.logprobs(micro)
        terms = minibatch.terms(index, logp, whole)
        sums = objective.sums(terms, given)
        (sums.loss / normaliser).backward()  # type: ignore[no-untyped-call]
        _count(own, micro, terms, sums, entropy)
        if minibatch.is_first:
            own.add(first_ratio=float(sums.ratio), first_tokens=micro.targets)


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
        far=float((micro.known & ((terms.logp.detach() - micro.behaviour).abs() > LARGEST_LOG_RATIO)).sum()),
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


def _speed(tally: Tally, peak_flops: float) -> dict[str, float]:
    """Of the whole step, from packing to the optimizer. peak_flops: per second, of all ranks."""
    took_s = sum(tally.seconds.values())
    flops = tally.sums.get("flops", 0.0)
    if not flops or took_s <= 0:
        return {}
    return {"tokens_per_s": tally.sums.get("tokens", 0.0) / took_s, "mfu": flops / took_s / peak_flops}


def _statistics(tally: Tally, norms: Sequence[float]) -> dict[str, float]:
    statistics = {
        "trainable_tokens": tally.sums.get("tokens", 0.0),
        "padded_tokens": tally.sums.get("padded_tokens", 0.0),
        "loss": tally.mean("loss", "normaliser"),
        "entropy": tally.mean("entropy"),
        "kl": tally.mean("kl"),
        "clip_share": tally.mean("clipped"),
        "ratio_mean": tally.mean("ratio"),
        "ratio_first": tally.mean("first_ratio", "first_tokens"),
        "weight_mean": tally.mean("weight"),
        "far_tokens": tally.sums.get("far", 0.0),
        "unweighted_share": tally.mean("unweighted"),
        "approximate_weight_share": tally.mean("approximate"),
        "grad_norm": sum(norms) / max(len(norms), 1),
    }
    if tally.sums.get("compared", 0.0) > 0:
        # π_prox / π_behaviour of tokens sampled under this very version: 1 when learner and engine agree (C06).
        statistics["sampler_ratio"] = tally.mean("sampler", "compared")
    return statistics | tally.seconds
