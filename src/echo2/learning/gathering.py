"""Tensors whose rows lie with several ranks, brought together one at a time.

Invariant: rank 0 holds one whole tensor at a time and asks for it by name; the others serve until it has no more
questions. So nobody holds the model twice, and rank 0 may stop wherever it fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from echo2.learning.policy_model import own_rows
from echo2.learning.ranks import Ranks
from echo2.learning.weights import Kind, Tensors


def whole_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of those tensors that are split over ranks."""
    return {name: tuple(value.shape) for name, value in tensors.items() if hasattr(value, "to_local")}


def serve(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], ranks: Ranks) -> None:
    """Give rank 0 the rows it asks for, until it has no more questions."""
    while name := ranks.broadcast(b"").decode():
        ranks.collect(own_rows(tensors[name]).detach().cpu(), shapes[name])


@contextmanager
def gathered(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], ranks: Ranks
) -> Iterator[Tensors | None]:
    """The whole tensors for rank 0; the other ranks serve them, and then find None.

    tensors: this rank's rows, or split tensors.  shapes: of those that are split, whole; the others are rank 0's.
    """
    if ranks.rank:
        serve(tensors, shapes, ranks)
        yield None
        return

    def read(name: str) -> Tensor:
        own = own_rows(tensors[name]).detach()
        if name not in shapes:
            return own
        ranks.broadcast(name.encode())
        return ranks.collect(own.cpu(), shapes[name])

    kinds = {name: Kind(value.dtype, shapes.get(name, tuple(value.shape))) for name, value in tensors.items()}
    try:
        yield Tensors(kinds, read)
    finally:
        ranks.broadcast(b"")
