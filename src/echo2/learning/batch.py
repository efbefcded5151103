"""From the records of a batch to rows the learner can train on.

Invariant (I8): a token carries loss only if the policy sampled it and something precedes it; ids, mask and log-probs
are the engine's, aligned one to one, never re-tokenised. Whatever cannot be trained on is left out and counted, so no
record can ruin the weights or stop the run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from echo2.config.sections import LearningSection
from echo2.learning.advantages import Advantages, Scale, normalised_advantages
from echo2.transport.messages import BatchReply, BatchRow
from echo2.types import (
    LARGEST_LOGPROB,
    LOGPROBS_FULL_VOCAB_AT_TEMPERATURE,
    SMALLEST_LOGPROB,
    FinishReason,
    Trajectory,
)


@dataclass(frozen=True)
class BatchRules:
    """The configured choices; see ``LearningSection``."""

    advantage_scale: Scale = "population"
    advantage_eps: float = 1e-6
    overlong: Literal["train", "mask"] = "train"
    zero_variance: Literal["keep", "drop"] = "keep"
    max_age_steps: int | None = None
    vocabulary: int = 2**32
    """Token ids must be below it."""


def batch_rules(learning: LearningSection, vocabulary: int) -> BatchRules:
    """What the configuration leaves open is the objective's own."""
    return BatchRules(
        advantage_scale=learning.settled("advantage_scale"),
        advantage_eps=learning.advantage_eps,
        overlong=learning.settled("overlong"),
        zero_variance=learning.settled("zero_variance"),
        max_age_steps=learning.max_age_steps,
        vocabulary=vocabulary,
    )


@dataclass(frozen=True)
class TrainingRow:
    """One trajectory as the learner sees it; all arrays are aligned with the tokens."""

    group: int
    """Number of its lease group within the batch, from 0 on: the same on every rank."""
    tokens: NDArray[np.int64]
    """[L]"""
    loss: NDArray[np.bool_]
    """[L] True where the token is a target of the loss; never at 0, which nothing predicts"""
    behaviour: NDArray[np.float32] | None
    """[L] log π_behaviour where ``loss``; None where the engine reported none the learner can use: then w = 1"""
    advantage: float
    temperature: float
    current: bool
    """Every token was sampled under the version the step starts from."""
    nucleus: bool
    """top-p was below 1: the importance weight is approximate."""

    @property
    def targets(self) -> int:
        return int(self.loss.sum())


@dataclass(frozen=True)
class TrainingBatch:
    rows: tuple[TrainingRow, ...]
    """In the batch's order, unusable ones left out."""
    advantages: Advantages
    unusable_rows: int
    """Left out of normalisation and loss: reward not finite, token ids outside the vocabulary, no token at all."""
    overlong_rows: int
    """Without loss because they were cut at the token limit; their reward counts in their key's mean."""
    dropped_rows: int
    """Without loss because the rewards of their key do not differ and ``zero_variance`` is "drop"."""
    aged_tokens: int
    """Sampled tokens without loss because they were sampled more than ``max_age_steps`` before."""

    @property
    def trainable_tokens(self) -> int:
        return sum(row.targets for row in self.rows)

    @property
    def counts(self) -> dict[str, float]:
        """What a step's statistics say of it."""
        return {
            "zero_variance_groups": self.advantages.zero_variance_keys,
            "single_row_groups": self.advantages.single_keys,
            "unusable_rows": self.unusable_rows,
            "overlong_rows": self.overlong_rows,
            "dropped_rows": self.dropped_rows,
            "aged_tokens": self.aged_tokens,
        }

    @property
    def groups(self) -> int:
        return 1 + max((row.group for row in self.rows), default=-1)


def form_training_batch(batch: BatchReply, rules: BatchRules) -> TrainingBatch:
    """Decode, normalise, mask. Raises msgspec.MsgspecError for a record that is no trajectory; admission has none."""
    usable: list[tuple[BatchRow, Trajectory, NDArray[np.int64]]] = []
    for row in batch.rows:
        record = msgspec.msgpack.decode(row.record, type=Trajectory)
        tokens = _tokens(record)
        if _is_usable(record, tokens, rules.vocabulary):
            usable.append((row, record, tokens))
    advantages = normalised_advantages(
        [record.reward for _, record, _ in usable],
        [_key(row, record) for row, record, _ in usable],
        scale=rules.advantage_scale,
        eps=rules.advantage_eps,
    )
    dropped = ~advantages.signal if rules.zero_variance == "drop" else np.zeros_like(advantages.signal)
    numbers: dict[int, int] = {}
    rows = []
    overlong = aged = 0
    for (row, record, tokens), advantage, drop in zip(usable, advantages.values, dropped, strict=True):
        loss = _sampled(record)
        old = loss & _is_too_old(record, batch.step, rules)
        loss &= ~old
        if cut := _is_masked_overlong(record, rules):
            loss[:] = False
        if drop:
            loss[:] = False
        overlong += cut
        aged += int(old.sum())
        group = numbers.setdefault(row.group_id, len(numbers))
        rows.append(_training_row(group, record, tokens, loss, float(advantage), batch.step))
    unusable = len(batch.rows) - len(usable)
    return TrainingBatch(tuple(rows), advantages, unusable, overlong, int(dropped.sum()), aged)


def minibatches(rows: Sequence[TrainingRow], updates: int) -> list[tuple[TrainingRow, ...]]:
    """Disjoint minibatches of whole groups, one per optimizer update; some are empty when groups are too few.

    Groups are dealt in turn: batches are ordered by version, and every update should see old and fresh ones.
    """
    groups: dict[int, list[TrainingRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    ordered = list(groups.values())
    return [tuple(row for group in ordered[first::updates] for row in group) for first in range(updates)]


def _tokens(record: Trajectory) -> NDArray[np.int64]:
    parts = [segment.tokens.astype(np.int64) for segment in record.segments]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _is_usable(record: Trajectory, tokens: NDArray[np.int64], vocabulary: int) -> bool:
    return (
        math.isfinite(record.reward)
        and math.isfinite(record.temperature)
        and record.temperature > 0
        and tokens.size > 0
        and int(tokens.max()) < vocabulary
    )


def _key(row: BatchRow, record: Trajectory) -> Hashable:
    """The same prompt leased twice stays two groups unless the task gave both records one key."""
    if record.normalisation_key is None:
        return row.group_id
    return (record.task, record.normalisation_key)


def _is_masked_overlong(record: Trajectory, rules: BatchRules) -> bool:
    return rules.overlong == "mask" and record.finish_reason is FinishReason.LENGTH


def _sampled(record: Trajectory) -> NDArray[np.bool_]:
    """[L] sampled by the policy, and preceded by something that predicts it."""
    parts = [np.full(len(segment.tokens), segment.sampled) for segment in record.segments]
    sampled = np.concatenate(parts).astype(np.bool_)
    sampled[0] = False
    return sampled


def _is_too_old(record: Trajectory, step: int, rules: BatchRules) -> NDArray[np.bool_]:
    """[L] sampled more than ``max_age_steps`` training steps before this one, by each token's own version."""
    if rules.max_age_steps is None:
        return np.zeros(sum(len(segment.tokens) for segment in record.segments), np.bool_)
    oldest = record.policy_min.version
    versions = [
        np.full(len(segment.tokens), oldest) if segment.version_values is None else segment.version_values
        for segment in record.segments
    ]
    too_old: NDArray[np.bool_] = step - np.concatenate(versions).astype(np.int64) > rules.max_age_steps
    return too_old


def _training_row(
    group: int,
    record: Trajectory,
    tokens: NDArray[np.int64],
    loss: NDArray[np.bool_],
    advantage: float,
    step: int,
) -> TrainingRow:
    return TrainingRow(
        group=group,
        tokens=tokens,
        loss=loss,
        behaviour=_behaviour(record, loss),
        advantage=advantage,
        temperature=record.temperature,
        current=record.policy_min.version == record.policy_max.version == step,
        nucleus=record.top_p < 1,
    )


def _behaviour(record: Trajectory, loss: NDArray[np.bool_]) -> NDArray[np.float32] | None:
    """Log-probs of the convention the learner computes, of every loss-bearing token, as a sampled token has; else
    None."""
    if record.logprob_convention != LOGPROBS_FULL_VOCAB_AT_TEMPERATURE:
        return None
    parts = []
    for segment in record.segments:
        values = segment.logprob_values
        if not segment.sampled:
            values = np.zeros(len(segment.tokens), np.float32)
        if values is None or len(values) != len(segment.tokens):
            return None
        parts.append(values)
    behaviour = np.concatenate(parts)
    told = behaviour[loss]
    return behaviour if bool(((told > SMALLEST_LOGPROB) & (told <= LARGEST_LOGPROB)).all()) else None
