"""avg@k and pass@k with 95 % intervals.

Invariant: pure. A prompt is one observation: values are means over prompts of what a prompt's replies give, and an
interval is what the spread over prompts gives. Replies that failed are no attempts.

avg@k: the share of a prompt's k replies that pass. pass@k: the chance that at least one of k replies passes, by the
estimator 1 − C(n−c, k)/C(n, k) of n replies of which c pass, unbiased for n ≥ k (arXiv 2107.03374, equation 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, Literal

import msgspec

NORMAL_95 = 1.959964
"""Half width of a 95 % interval in standard errors."""


class Metric(msgspec.Struct, frozen=True):
    """What a benchmark is reported by, e.g. avg@64."""

    kind: Literal["avg", "pass"]
    k: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.k}"


def pass_at(replies: int, passed: int, k: int) -> float:
    """Chance that one of ``k`` of the replies passes. Raises ValueError below k replies."""
    if not 0 <= passed <= replies or not 1 <= k <= replies:
        raise ValueError(f"pass@k needs at least k replies, got k = {k}, {replies} replies, {passed} passed")
    return 1.0 - comb(replies - passed, k) / comb(replies, k)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Normal 95 % interval of the mean; None below two values, which have no spread to judge by."""
    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = NORMAL_95 * (variance / count) ** 0.5
    return mean - half, mean + half


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """Mean over prompts, its interval, and over how many prompts."""
    mean = sum(values) / len(values) if values else None
    return {"value": mean, "ci95": interval(values), "prompts": len(values)}


def measures(rewards: Mapping[str, Sequence[float]], passing: float, samples: int) -> dict[str, Any]:
    """avg@samples and pass@k for k = 1, 2, 4 … samples, of rewards by prompt; a reply passes from ``passing`` on.

    A prompt with fewer than k finished replies has no unbiased estimate of pass@k and is left out of it.
    """
    counts = [(len(each), sum(reward >= passing for reward in each)) for each in rewards.values() if each]
    found = {str(Metric("avg", samples)): estimate([passed / replies for replies, passed in counts])}
    for k in _ladder(samples):
        values = [pass_at(replies, passed, k) for replies, passed in counts if replies >= k]
        found[str(Metric("pass", k))] = estimate(values)
    return found


def _ladder(most: int) -> list[int]:
    steps = [1]
    while steps[-1] * 2 <= most:
        steps.append(steps[-1] * 2)
    return steps if steps[-1] == most else [*steps, most]
