"""Groups, rows and the changes that make them durable.

Invariant (I3): a row is one (group, index, attempt); it is born with its verdict and is in exactly one ``RowState``
from then on. A change is data: applied in order to an empty store, changes rebuild the buffer.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from echo2.types import Policy, Prompt, RowState, Verdict

RowKey = tuple[int, int, int]
"""(group, index, attempt)"""


class GroupState(StrEnum):
    OPEN = "open"
    """Some index is not final: leased, or waiting for another attempt."""
    CLOSED = "closed"
    """Every index is final and at least two rows are accepted: a batch may take it."""
    TAKEN = "taken"
    """In a formed batch."""
    TRAINED = "trained"
    DROPPED = "dropped"
    """Aged out, too few survivors, or without signal."""

    @property
    def is_live(self) -> bool:
        return self in (GroupState.OPEN, GroupState.CLOSED)

    @property
    def is_retired(self) -> bool:
        return self in (GroupState.TRAINED, GroupState.DROPPED)


class Lease(msgspec.Struct, frozen=True):
    lease_id: str
    worker_id: str
    policy: Policy
    """Installed on the worker when the lease was granted."""
    indices: tuple[int, ...]


class Row(msgspec.Struct, frozen=True):
    group_id: int
    index: int
    attempt: int
    state: RowState
    verdict: Verdict
    reward: float | None
    """None for a row without a readable record."""
    policy: Policy
    """Oldest policy that sampled a token of it."""
    tokens: int
    """Tokens the policy sampled."""
    truncated: bool
    digest: str
    """blake3 of the record's bytes; empty for a row without a record."""
    normalisation_key: str | None = None
    """The record's: its advantage is measured against other groups' rows of the same key, too."""

    @property
    def key(self) -> RowKey:
        return (self.group_id, self.index, self.attempt)


class Group(msgspec.Struct):
    """The n trajectories of one prompt. ``group_id`` is also the lease sequence: lower means leased earlier."""

    group_id: int
    prompt: Prompt
    size: int
    state: GroupState = GroupState.OPEN
    attempts: list[Lease] = []
    """Every lease ever granted for it; attempt k is ``attempts[k - 1]``."""
    leased: bool = False
    """Whether the newest attempt still runs."""
    policy: Policy | None = None
    """Oldest policy among accepted rows and the running lease; admission and the gate use it."""
    batch: int | None = None

    @property
    def attempt(self) -> int:
        return len(self.attempts)


class RowPut(msgspec.Struct, frozen=True):
    """A row is born; ``record`` is kept until the step that trained it is checkpointed."""

    row: Row
    record: bytes | None


class RowsMoved(msgspec.Struct, frozen=True):
    keys: tuple[RowKey, ...]
    state: RowState
    verdict: Verdict | None = None
    """The verdict that replaces the first one; None leaves it."""


class GroupPut(msgspec.Struct, frozen=True):
    group: Group


class Batch(msgspec.Struct, frozen=True):
    """Batch t: formed once, immutable."""

    step: int
    digest: str
    rows: tuple[RowKey, ...]


class BatchPut(msgspec.Struct, frozen=True):
    batch: Batch


class BatchesDropped(msgspec.Struct, frozen=True):
    """Batches of a lost history: steps ``first_step`` and later."""

    first_step: int


class RecordsDropped(msgspec.Struct, frozen=True):
    """Records of batches before ``before_step`` and of rows that can no longer be trained are not needed any more."""

    before_step: int


Change = RowPut | RowsMoved | GroupPut | BatchPut | BatchesDropped | RecordsDropped
