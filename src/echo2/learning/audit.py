"""Behaviour log-probs compared with those of the very weights that a row names.

Invariant: an audit changes nothing. The snapshot's tensors stand in for the weights while no step runs, in memory that
the gradients take a moment later (``stand_in.py``). What cannot be compared (no snapshot of
that version here, several versions in one row, no log-probs, numbers that are not finite) is evidence of nothing.

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
from echo2.learning.stand_in import standing_in
from echo2.transport.messages import AUDIT_EDGES_NATS, BatchReply, BatchRow, RowAudit
from echo2.transport.partial import OBJECT_NAME, folder_name
from echo2.types import LOGPROBS_FULL_VOCAB_AT_TEMPERATURE, Policy

LOG = logging.getLogger(__name__)

MOST_NATS = 100.0
"""A token's difference counts as no more, whatever a worker wrote there."""


class _Named(msgspec.Struct):
    """What a record says of its origin."""

    policy_min: Policy
    policy_max: Policy
    logprob_convention: str | None = None


class Auditor:
    def __init__(
        self, policy: PolicyModel, snapshots: Path, rows: int, rules: BatchRules, ranks: Ranks = ONE_RANK
    ) -> None:
        """snapshots: folder of the published versions' folders.  rows: most rows looked at per step; 0 for none."""
        self._policy = policy
        self._snapshots = snapshots
        self._rows = rows
        self._ranks = ranks
        self._rules = replace(rules, overlong="train")

    def audit(self, reply: BatchReply) -> tuple[RowAudit, ...]:
        """Of a sample of the batch's rows, all of one version; rank 0 gets them all. Blocking; never beside a step."""
        version, sample = self._drawn(reply)
        rows = [(row, made) for row in sample if (made := self._comparable(reply, row)) is not None]
        if not rows:
            return ()
        try:
            with standing_in(self._policy, self._snapshots / version, self._ranks):
                return self._compared(rows)
        except (IntegrityError, torch.OutOfMemoryError) as error:
            if self._ranks.world > 1 and not isinstance(error, IntegrityError):
                raise  # the others did not run out of memory and wait
            LOG.warning("step %d: log-probs were not compared: %s", reply.step, error)
            return ()

    def _drawn(self, reply: BatchReply) -> tuple[str, Sequence[BatchRow]]:
        """What rank 0 draws, whose snapshots they are."""
        told = b""
        if self._ranks.rank == 0:
            version, sample = draw(reply, self._snapshots, self._rows)
            keys = [(row.group_id, row.index) for row in sample]
            told = msgspec.msgpack.encode((version.name if version is not None else "", keys))
        name, keys = msgspec.msgpack.decode(self._ranks.broadcast(told), type=tuple[str, list[tuple[int, int]]])
        rows = {(row.group_id, row.index): row for row in reply.rows}
        return name, [rows[key] for key in keys]

    def _compared(self, rows: Sequence[tuple[BatchRow, TrainingRow]]) -> tuple[RowAudit, ...]:
        """Each rank takes its turn of the rows; all run equally many passes."""
        rank, world = self._ranks.rank, self._ranks.world
        mine = rows[rank::world]
        found = [audit for row, made in mine if (audit := self._compare(row, made)) is not None]
        if len(mine) < -(-len(rows) // world):
            with torch.no_grad():
                self._policy.logprobs(empty_micro_batch().to(self._policy.device))
        told = self._ranks.gather(msgspec.msgpack.encode(found))
        return tuple(audit for one in told for audit in msgspec.msgpack.decode(one, type=list[RowAudit]))

    def _comparable(self, reply: BatchReply, row: BatchRow) -> TrainingRow | None:
        rows = form_training_batch(msgspec.structs.replace(reply, rows=(row,)), self._rules).rows
        return rows[0] if rows and rows[0].targets and rows[0].behaviour is not None else None

    @torch.no_grad()
    def _compare(self, row: BatchRow, made: TrainingRow) -> RowAudit | None:
        assert made.behaviour is not None, "only rows with log-probs are compared"
        (micro,) = pack([made], budget=len(made.tokens), share_prefixes=False)
        logp, entropy = (
            values.double().cpu().numpy() for values in self._policy.logprobs(micro.to(self._policy.device))
        )
        if not (np.isfinite(logp).all() and np.isfinite(entropy).all()):
            return None
        excess = None if made.nucleus else float(np.maximum(logp + entropy, -MOST_NATS).sum())
        return row_audit(row, logp, made.behaviour[made.loss], excess)


def row_audit(row: BatchRow, ours: NDArray[np.float64], theirs: NDArray[np.float32], excess: float | None) -> RowAudit:
    """ours, theirs: [T] log-probs of one row's sampled tokens, all finite."""
    gaps = np.minimum(np.abs(ours - theirs), MOST_NATS)
    bins = np.bincount(np.searchsorted(AUDIT_EDGES_NATS, gaps, side="right"), minlength=len(AUDIT_EDGES_NATS) + 1)
    return RowAudit(row.group_id, row.index, tuple(bins.tolist()), float(gaps.sum()), float(gaps.max()), excess)


def draw(reply: BatchReply, snapshots: Path, most: int) -> tuple[Path | None, Sequence[BatchRow]]:
    """The folder of a version that lies here, and at most so many rows of it, spread over as many groups as there are.

    A version is drawn as often as it has rows, so nobody escapes by naming one that others have left.
    """
    random = Random(f"{reply.digest}/{reply.step}")
    found: list[tuple[Policy, BatchRow]] = []
    if most:
        for row in reply.rows:
            named = msgspec.msgpack.decode(row.record, type=_Named)
            if named.policy_min == named.policy_max and named.logprob_convention == LOGPROBS_FULL_VOCAB_AT_TEMPERATURE:
                found.append((named.policy_min, row))
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
    return snapshots / folder_name(chosen), [row for turn in turns for row in turn if row is not None][:most]
