"""How long modelled engines take.

Invariant: a group's time is that of its slowest reply, and of the replies that waited for a place behind others; it is
a function of the lengths that are drawn and of nothing else, so the same draws take the same time. Pure.

Lengths of reasoning replies have heavy tails: log-normal ones in the middle of training, Pareto ones where a policy
loops. Both are cut at the run's token limit, where many then lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from random import Random
from typing import Literal

import msgspec


class LengthModel(msgspec.Struct, frozen=True):
    """Tokens of one reply."""

    median_tokens: float = 400.0
    tail: Literal["lognormal", "pareto"] = "lognormal"
    spread: float = 0.6
    """Log-normal: sigma. Pareto: 1/alpha, so that more is heavier in both."""

    def draw(self, random: Random, most_tokens: int) -> int:
        if self.tail == "pareto":
            # Half of a Pareto's mass lies beyond least * 2**(1/alpha).
            least = self.median_tokens / 2.0**self.spread
            length = least * random.paretovariate(1 / self.spread) if self.spread > 0 else self.median_tokens
        else:
            length = self.median_tokens * math.exp(random.normalvariate(0.0, self.spread))
        return max(1, min(most_tokens, round(length)))


class EngineModel(msgspec.Struct, frozen=True):
    tokens_per_s: float = 40.0
    """Of one reply, while no more are generated than there are places."""
    places: int = 16
    """Replies generated side by side at that speed; more wait for a place."""
    prefill_s: float = 0.0
    """Reading the prompt, once per group."""
    lengths: LengthModel = LengthModel()
    slowness: float = 1.0
    """Factor on every time: above 1 for a straggler."""

    def group_s(self, random: Random, replies: int, most_tokens: int, lanes: int = 1) -> float:
        """Seconds for a group of so many replies, where so many groups share the engine."""
        lengths = [self.lengths.draw(random, most_tokens) for _ in range(replies)]
        places = max(1, self.places // max(1, lanes))
        return self.slowness * (self.prefill_s + longest(lengths, places) / self.tokens_per_s)


def longest(lengths: Sequence[int], places: int) -> float:
    """Tokens until the last reply is done, when each begins as soon as a place is free."""
    if len(lengths) <= places:
        return max(lengths, default=0)
    busy = list(lengths[:places])
    heapify(busy)
    for length in lengths[places:]:
        heapreplace(busy, busy[0] + length)
    return max(busy)


def with_stragglers(models: Sequence[EngineModel], share: float, factor: float, random: Random) -> list[EngineModel]:
    """A share of the engines, chosen at random, takes so many times as long."""
    slow = set(random.sample(range(len(models)), round(share * len(models))))
    return [
        msgspec.structs.replace(model, slowness=factor * model.slowness) if index in slow else model
        for index, model in enumerate(models)
    ]
