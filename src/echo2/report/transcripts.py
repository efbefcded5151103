"""A few trajectories of each step, as people read them.

Invariant: the text is a rendering for people only. Nothing is ever trained on it, and it is untrusted: whoever shows it
escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from echo2.types import Policy, Trajectory

MAX_TURN_CHARACTERS = 8_000
"""Of one turn; the middle of a longer one is left out, since a reply's beginning and end tell most."""


class Turn(msgspec.Struct, frozen=True):
    sampled: bool
    """True where the policy spoke."""
    text: str


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``transcripts.jsonl``."""

    step: int
    """Training step that used the trajectory."""
    policy: Policy
    staleness: int
    task: str
    prompt_id: str
    reward: float
    finish_reason: str
    sampled_tokens: int
    turns: tuple[Turn, ...]


def transcript(trajectory: Trajectory, step: int, decode: Callable[[Sequence[int]], str]) -> Transcript:
    """Render ``trajectory``, trained on at ``step``; ``decode`` turns token ids into text."""
    turns = tuple(
        Turn(segment.sampled, shorten(decode([int(token) for token in segment.tokens])))
        for segment in trajectory.segments
    )
    return Transcript(
        step=step,
        policy=trajectory.policy_min,
        staleness=step - trajectory.policy_min.version,
        task=trajectory.task,
        prompt_id=trajectory.prompt_id,
        reward=trajectory.reward,
        finish_reason=trajectory.finish_reason.value,
        sampled_tokens=trajectory.sampled_tokens,
        turns=turns,
    )


def choose(rewards: Sequence[float], count: int) -> list[int]:
    """Which ``count`` of a batch to show: the best, the worst, then evenly between them by reward.

    Indices into ``rewards``, best first; the same rewards always give the same choice.
    """
    ranked = sorted(range(len(rewards)), key=lambda index: (-rewards[index], index))
    if count >= len(ranked):
        return ranked
    if count <= 1:
        return ranked[:count]
    return [ranked[round(place * (len(ranked) - 1) / (count - 1))] for place in range(count)]


def shorten(text: str, limit: int = MAX_TURN_CHARACTERS) -> str:
    """``text`` with its middle left out when it is longer than ``limit``, saying how much is gone."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
