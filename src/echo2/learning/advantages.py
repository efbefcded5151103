"""Group-normalised advantages (DeepSeekMath, arXiv 2402.03300, §4.1.2).

Invariant: an advantage depends on the rewards of its own normalisation key and on nothing else, neither the order of
arrival nor other keys. A key whose rewards are all equal, or that has one trajectory, gives exactly 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Scale = Literal["population", "sample", "none"]


@dataclass(frozen=True)
class Advantages:
    values: NDArray[np.float32]
    """[R] in the order of the rewards"""
    signal: NDArray[np.bool_]
    """[R] False where the rewards of the key do not differ, so that its advantages are 0"""
    keys: int
    """Distinct normalisation keys."""
    zero_variance_keys: int
    """Keys of at least two trajectories whose rewards are all equal."""
    single_keys: int
    """Keys of one trajectory."""


def normalised_advantages(
    rewards: Sequence[float], keys: Sequence[Hashable], *, scale: Scale, eps: float
) -> Advantages:
    """A_i = (r_i - mean of the key) / (std of the key + eps).

    rewards: [R] finite.  keys: [R] normalisation key of each reward.
    scale: `population` divides by sqrt(Σ(r - mean)²/n), `sample` by sqrt(Σ(r - mean)²/(n - 1)), `none` by nothing
    (eps is then unused), which is Dr. GRPO's choice (arXiv 2503.20783).

    Example: rewards 1, 0, 0, 0 → 1.7321, -0.5774 … (population), 1.5, -0.5 … (sample), 0.75, -0.25 … (none).
    """
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    values = np.zeros(len(rewards), dtype=np.float64)
    signal = np.zeros(len(rewards), dtype=np.bool_)
    zero_variance = single = 0
    for indices in members.values():
        group = np.asarray([rewards[i] for i in indices], dtype=np.float64)
        if len(group) == 1:
            single += 1
        elif group.max() == group.min():
            zero_variance += 1  # compared exactly: the mean of equal rewards may differ from them by rounding
        else:
            values[indices] = _normalised(group, scale, eps)
            signal[indices] = True
    with np.errstate(over="ignore"):  # what float32 does not hold becomes infinite, and its update is skipped
        narrow = values.astype(np.float32)
    return Advantages(narrow, signal, len(members), zero_variance, single)


def _normalised(group: NDArray[np.float64], scale: Scale, eps: float) -> NDArray[np.float64]:
    # Divided by the largest magnitude first, so that squares of huge rewards stay finite.
    magnitude = float(np.abs(group).max())
    unit = group / magnitude
    centred: NDArray[np.float64] = unit - unit.mean()
    if scale == "none":
        centred *= magnitude
        return centred
    spread = float(centred.std(ddof=1 if scale == "sample" else 0))
    centred /= spread + eps / magnitude
    return centred
