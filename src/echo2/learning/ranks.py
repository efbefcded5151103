"""What the ranks of a learner say to each other.

Invariant: every rank calls the same methods in the same order, and then all of them hold the same answer. So whatever
is decided from an answer is decided alike: how many micro-batches there are, whether an update is skipped, what failed.

A learner of one rank is its own ``OneRank``; nothing here imports torch.distributed. What travels is data: numbers,
records, rows of tensors, never pickled objects (I9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from echo2.errors import ConfigError, DiskFull, Echo2Error, IntegrityError, UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

SHARED_ERRORS: tuple[type[Echo2Error], ...] = (ConfigError, UserError, IntegrityError, DiskFull)
"""Failures of one rank that all ranks raise, narrower ones first."""


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def here(self) -> int:
        """Ranks on this machine, which share its memory."""
        ...

    @property
    def local(self) -> int:
        """This rank's number among those."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes; what the others give is not looked at."""
        ...

    def collect(self, own: Tensor, shape: Sequence[int]) -> Tensor:
        """own: this rank's rows of a tensor of ``shape``, on the CPU.  Rank 0 gets the whole one, others their rows."""
        ...


class OneRank:
    """Nobody else is there."""

    rank = 0
    world = 1
    here = 1
    local = 0

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data

    def collect(self, own: Tensor, shape: Sequence[int]) -> Tensor:
        return own


ONE_RANK = OneRank()


class Span(NamedTuple):
    """Rows [first, end) of a tensor."""

    first: int
    end: int


def rows_of(rank: int, world: int, count: int) -> Span:
    """Which of ``count`` rows a rank holds: equal blocks, rounded up, so that the last ranks may hold fewer or none.

    As ``torch.chunk`` cuts, and so FSDP.
    """
    block = -(-count // world)
    return Span(min(rank * block, count), min((rank + 1) * block, count))


def totals(ranks: Ranks, values: Mapping[str, float]) -> dict[str, float]:
    """Sums over the ranks, added in order of rank; a name may be missing on some."""
    if ranks.world == 1:
        return dict(values)
    sums: dict[str, float] = {}
    for packed in ranks.gather(msgspec.msgpack.encode(values)):
        for name, value in msgspec.msgpack.decode(packed, type=dict[str, float]).items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def total(ranks: Ranks, values: Tensor) -> Tensor:
    """[K] float64 of every rank → their sum, added in order of rank."""
    if ranks.world == 1:
        return values
    told = [np.frombuffer(packed) for packed in ranks.gather(values.cpu().numpy().tobytes())]
    return values.new_tensor(np.sum(told, axis=0))


def everyones(ranks: Ranks, value: int) -> list[int]:
    """In order of rank."""
    return [msgspec.msgpack.decode(packed, type=int) for packed in ranks.gather(msgspec.msgpack.encode(value))]


class _Outcome(msgspec.Struct, frozen=True):
    kind: str = ""
    sentence: str = ""


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do what may fail on one rank alone; where it did, every rank raises that failure.

    ``work`` must not speak to other ranks. What is no failure of ours (see ``SHARED_ERRORS``) passes on the rank it
    befell, which ends the learner there and, through its absence, everywhere.
    """
    if ranks.world == 1:
        return work()
    made: list[T] = []
    own: Echo2Error | None = None
    try:
        made.append(work())
    except SHARED_ERRORS as error:
        own = error
    outcome = _Outcome() if own is None else _Outcome(_kind(own).__name__, str(own))
    for rank, packed in enumerate(ranks.gather(msgspec.msgpack.encode(outcome))):
        told = msgspec.msgpack.decode(packed, type=_Outcome)
        if told.kind:
            raise (own if own is not None and rank == ranks.rank else _as_told(told)) from own
    return made.pop()


def _kind(error: Echo2Error) -> type[Echo2Error]:
    return next(kind for kind in SHARED_ERRORS if isinstance(error, kind))


def _as_told(told: _Outcome) -> Echo2Error:
    return next(kind for kind in SHARED_ERRORS if kind.__name__ == told.kind)(told.sentence)
