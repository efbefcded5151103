"""Which keys of ``learning`` each objective reads, with its own defaults: those of its paper.

Invariant: a key is listed for an objective exactly when the objective reads it; a test watches them read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BATCH: Mapping[str, Any] = {"advantage_scale": "population", "overlong": "train", "zero_variance": "keep"}
"""Read for every objective, when a batch is formed."""

_GRPO: Mapping[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "truncation": 2.0}

OBJECTIVE_KEYS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {**_BATCH, **_GRPO},
    "grpo_paper": {**_BATCH, **_GRPO},
    "dr_grpo": {**_BATCH, **_GRPO, "advantage_scale": "none"},
    "dapo": {**_BATCH, **_GRPO, "clip_high": 0.28, "overlong": "mask", "zero_variance": "drop"},
    "gspo": {**_BATCH, "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {**_BATCH, "clip_high": 3.0},
    "decoupled_ppo": {**_BATCH, **_GRPO, "truncation": 5.0},
    "m2po": {**_BATCH, "second_moment": 0.04},
    "gepo": {**_BATCH, "clip_low": 0.2, "clip_high": 0.2},
    "dppo_tv": {**_BATCH, **_GRPO, "truncation": 10.0},
}

CHOOSABLE = tuple(dict.fromkeys(key for keys in OBJECTIVE_KEYS.values() for key in keys))
"""Every key whose default an objective decides."""
