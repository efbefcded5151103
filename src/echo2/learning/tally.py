"""What is counted of a training step's updates, and where its time went.

Invariant: sums are over loss-bearing tokens of updates that were done; what was skipped or computed in vain costs time
and counts nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echo2.learning.accounting import settle
from echo2.learning.objectives import ObjectiveSums, TokenTerms
from echo2.learning.objectives.terms import LARGEST_LOG_RATIO
from echo2.learning.packing import MicroBatch


@dataclass
class Tally:
    """Sums over the tokens of the updates that were done, and where the time went."""

    device: torch.device
    """Whose work is timed."""
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
        try:
            yield
        finally:
            settle(self.device)  # a GPU's work is done later than it is asked for
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began_s

    def mean(self, name: str, over: str = "tokens") -> float:
        return self.sums.get(name, 0.0) / max(self.sums.get(over, 0.0), 1.0)


def count(own: Tally, micro: MicroBatch, terms: TokenTerms, sums: ObjectiveSums, entropy: Tensor) -> None:
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


def speed(tally: Tally, peak_flops: float) -> dict[str, float]:
    """Of the whole step, from packing to the optimizer. peak_flops: per second, of all ranks."""
    took_s = sum(tally.seconds.values())
    flops = tally.sums.get("flops", 0.0)
    if not flops or took_s <= 0:
        return {}
    return {"tokens_per_s": tally.sums.get("tokens", 0.0) / took_s, "mfu": flops / took_s / peak_flops}


def statistics_of(tally: Tally, norms: Sequence[float]) -> dict[str, float]:
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
