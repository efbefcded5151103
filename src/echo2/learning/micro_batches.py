"""The micro-batches of one update, on each rank.

Invariant: every rank has equally many, so that passes meet; a rank with fewer rows computes empty ones. How large they
may be is decided by the rank with the least room.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from echo2.learning.batch import TrainingRow
from echo2.learning.memory import Room, budget_that_fits, room_of
from echo2.learning.packing import MicroBatch, empty_micro_batch, pack
from echo2.learning.policy_model import PolicyModel
from echo2.learning.ranks import Ranks, everyones
from echo2.learning.shares import share_of
from echo2.learning.shortage import Budget

LOG = logging.getLogger(__name__)


def micro_batches(
    policy: PolicyModel, rows: Sequence[TrainingRow], budget: Budget, ranks: Ranks, *, share_prefixes: bool
) -> list[MicroBatch]:
    """This rank's part of the update's rows, on the policy's device. Raises UserError on all ranks alike."""
    own = share_of(rows, ranks.rank, ranks.world)

    def packed(tokens: int) -> list[MicroBatch]:
        return pack(own, budget=tokens, share_prefixes=share_prefixes, pairs_per_token=policy.pairs_per_token)

    micros = packed(budget.tokens)
    told = ranks.gather(msgspec.msgpack.encode(room_of(policy, micros, ranks.here)))
    fits = budget_that_fits([msgspec.msgpack.decode(room, type=Room) for room in told], budget.tokens)
    if fits < budget.tokens:
        budget.splits += 1
        LOG.warning(
            "micro-batches may have %d tokens; memory has room for %d now, so they are split", budget.tokens, fits
        )
        micros = packed(fits)
    empty = max(everyones(ranks, len(micros))) - len(micros)
    return [micro.to(policy.device) for micro in (*micros, *(empty_micro_batch() for _ in range(empty)))]
