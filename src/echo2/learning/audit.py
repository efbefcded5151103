"""Behaviour log-probs compared with those of the very weights that a row names.

Invariant: an audit changes nothing. The snapshot's tensors stand in for the weights while no step runs, in memory that
the gradients take a moment later (``stand_in.py``). What cannot be compared (no snapshot of that version here, versions
of two incarnations in one row, no log-probs, numbers that are not finite) is evidence of nothing. Of a row of several
versions the tokens of one are compared, after all that was before them.

The snapshot on disk is what workers install, bit for bit, so what remains is rounding: a row's staleness plays no part.
Which rows are looked at follows from the digest of the whole batch, which no worker knows when it submits; a repeated
step audits the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from echo2.errors import IntegrityError
from echo2.learning.batch import BatchRules, TrainingRow, form_training_batch
from echo2.learning.packing import empty_micro_batch, pack
from echo2.learning.policy_model import PolicyModel
from echo2.learning.ranks import ONE_RANK, Ranks
from echo2.learning.shortage import TooLarge
from echo2.learning.stand_in import standing_in
from echo2.transport.messages import AUDIT_EDGES_NATS, BatchReply, BatchRow, RowAudit
from echo2.transport.partial import OBJECT_NAME, folder_name
from echo2.types import LOGPROBS_FULL_VOCAB_AT_TEMPERATURE, Policy, Segment

LOG = logging.getLogger(__name__)

MOST_NATS = 100.0
"""A token's difference counts as no more, whatever a worker wrote there."""


class _Named(msgspec.Struct):
    """What a record says of its origin."""

    policy_min: Policy
    policy_max: Policy
    segments: tuple[Segment, ...]
    logprob_convention: str | None = None

    @property
    def policies(self) -> set[Policy]:
        """Those that sampled some token; none where that cannot be told."""
        if self.policy_min == self.policy_max:
            return {self.policy_min}
        if self.policy_min.incarnation != self.policy_max.incarnation:
            return set()
        told = [segment.version_values for segment in self.segments if segment.sampled]
        if not told or any(versions is None for versions in told):
            return set()
        versions = np.unique(np.concatenate([versions for versions in told if versions is not None]))
        return {Policy(self.policy_min.incarnation, version) for version in versions.tolist()}

    def sampled_by(self, policy: Policy) -> NDArray[np.bool_]:
        """[L] over the record's tokens"""
        parts = [
            np.full(len(segment.tokens), segment.sampled and self.policy_min == policy)
            if segment.version_values is None
            else segment.version_values == policy.version
            for segment in self.segments
        ]
        return np.concatenate(parts)


class _Drawn(msgspec.Struct):
    policy: Policy | None
    rows: tuple[tuple[int, int], ...]
    """(group id, index)"""


class Auditor:
    def __init__(
        self, policy: PolicyModel, snapshots: Path, rows: int, rules: BatchRules, ranks: Ranks = ONE_RANK
    ) -> None:
        """snapshots: folder of the published versions' folders.  rows: most rows looked at per step; 0 for none."""
        self._policy = policy
        self._snapshots = snapshots
        self._rows = rows
        self._ranks = ranks
        self._rules = replace(rules, overlong="train", zero_variance="keep", max_age_steps=None)

    def audit(self, reply: BatchReply) -> tuple[RowAudit, ...]:
        """Of a sample of the batch's rows, each as far as one version sampled it; rank 0 gets them all.

        Blocking; never beside a step.
        """
        policy, sample = self._drawn(reply)
        rows = [(row, made) for row in sample if (made := self._comparable(reply, row)) is not None]
        if policy is None or not rows:
            return ()
        try:
            with standing_in(self._policy, self._snapshots / folder_name(policy), self._ranks):
                return self._compared(rows, policy)
        except (IntegrityError, TooLarge, torch.OutOfMemoryError) as error:
            if self._ranks.world > 1 and isinstance(error, torch.OutOfMemoryError):
                raise  # outside of a pass: the others did not run out of memory and wait
            LOG.warning("step %d: log-probs were not compared: %s", reply.step, error)
            return ()

    def _drawn(self, reply: BatchReply) -> tuple[Policy | None, Sequence[BatchRow]]:
        """What rank 0 draws, whose snapshots they are."""
        told = b""
        if self._ranks.rank == 0:
            policy, sample = draw(reply, self._snapshots, self._rows)
            told = msgspec.msgpack.encode(_Drawn(policy, tuple((row.group_id, row.index) for row in sample)))
        drawn = msgspec.msgpack.decode(self._ranks.broadcast(told), type=_Drawn)
        rows = {(row.group_id, row.index): row for row in reply.rows}
        return drawn.policy, [rows[key] for key in drawn.rows]

    def _compared(self, rows: Sequence[tuple[BatchRow, TrainingRow]], policy: Policy) -> tuple[RowAudit, ...]:
        """Each rank takes its turn of the rows; all run equally many passes."""
        rank, world = self._ranks.rank, self._ranks.world
        mine = rows[rank::world]
        found = []
        with self._policy.watch.noticing():
            found = [audit for row, made in mine if (audit := self._compare(row, made, policy)) is not None]
            if len(mine) < -(-len(rows) // world):
                with torch.no_grad():
                    self._policy.logprobs(empty_micro_batch().to(self._policy.device))
        self._policy.watch.agree(self._ranks, empty_micro_batch())
        told = self._ranks.gather(msgspec.msgpack.encode(found))
        return tuple(audit for one in told for audit in msgspec.msgpack.decode(one, type=list[RowAudit]))

    def _comparable(self, reply: BatchReply, row: BatchRow) -> TrainingRow | None:
        rows = form_training_batch(msgspec.structs.replace(reply, rows=(row,)), self._rules).rows
        return rows[0] if rows and rows[0].targets and rows[0].behaviour is not None else None

    @torch.no_grad()
    def _compare(self, row: BatchRow, made: TrainingRow, policy: Policy) -> RowAudit | None:
        assert made.behaviour is not None, "only rows with log-probs are compared"
        (micro,) = pack([made], budget=len(made.tokens), share_prefixes=False)
        logp, entropy = (
            values.double().cpu().numpy() for values in self._policy.logprobs(micro.to(self._policy.device))
        )
        its = msgspec.msgpack.decode(row.record, type=_Named).sampled_by(policy)[made.loss]
        logp, entropy, told = logp[its], entropy[its], made.behaviour[made.loss][its]
        if not len(logp) or not (np.isfinite(logp).all() and np.isfinite(entropy).all()):
            return None
        excess = None if made.nucleus else float(np.maximum(logp + entropy, -MOST_NATS).sum())
        return row_audit(row, logp, told, excess)


def row_audit(row: BatchRow, ours: NDArray[np.float64], theirs: NDArray[np.float32], excess: float | None) -> RowAudit:
    """ours, theirs: [T] log-probs of one row's sampled tokens, all finite."""
    gaps = np.minimum(np.abs(ours - theirs), MOST_NATS)
    bins = np.bincount(np.searchsorted(AUDIT_EDGES_NATS, gaps, side="right"), minlength=len(AUDIT_EDGES_NATS) + 1)
    return RowAudit(row.group_id, row.index, tuple(bins.tolist()), float(gaps.sum()), float(gaps.max()), excess)


def draw(reply: BatchReply, snapshots: Path, most: int) -> tuple[Policy | None, Sequence[BatchRow]]:
    """A version whose snapshot lies here, and at most so many rows with tokens of it, of as many groups as there are.

    A version is drawn as often as it has rows, so nobody escapes by naming one that others have left.
    """
    random = Random(f"{reply.digest}/{reply.step}")
    found: list[tuple[Policy, BatchRow]] = []
    if most:
        for row in reply.rows:
            named = msgspec.msgpack.decode(row.record, type=_Named)
            if named.logprob_convention == LOGPROBS_FULL_VOCAB_AT_TEMPERATURE:
                found += [(policy, row) for policy in sorted(named.policies)]
    here = {policy for policy, _ in found if (snapshots / folder_name(policy) / OBJECT_NAME).is_file()}
    found = [(policy, row) for policy, row in found if policy in here]
    if not found:
        return None, ()
    chosen = random.choice(found)[0]
    groups: dict[int, list[BatchRow]] = {}
    for policy, row in random.sample(found, len(found)):
        if policy == chosen:
            groups.setdefault(row.group_id, []).append(row)
    turns = zip_longest(*groups.values())
    return chosen, [row for turn in turns for row in turn if row is not None][:most]
