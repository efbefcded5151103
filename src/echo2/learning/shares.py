"""Which rows of an update each rank computes.

Invariant: every row is in exactly one share, and the shares are the same on whatever rank they are worked out. Rows of
a group stay together where that leaves no rank waiting, because together they share their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.learning.batch import TrainingRow


def share_of(rows: Sequence[TrainingRow], rank: int, world: int) -> tuple[TrainingRow, ...]:
    """The rows of one rank, in the order they came.

    Groups are cut into pieces no larger than an even share of the tokens; the largest piece goes first, to the rank
    with the fewest tokens.
    """
    if world == 1:
        return tuple(rows)
    trainable = [(index, row) for index, row in enumerate(rows) if row.loss.any()]
    even = sum(len(row.tokens) for _, row in trainable) / world
    pieces = _pieces(trainable, even)
    pieces.sort(key=lambda piece: -_tokens(piece))  # stable: equal ones stay in the batch's order
    loads = [0] * world
    mine: list[int] = []
    for piece in pieces:
        taker = loads.index(min(loads))
        loads[taker] += _tokens(piece)
        if taker == rank:
            mine += [index for index, _ in piece]
    return tuple(rows[index] for index in sorted(mine))


_Piece = list[tuple[int, TrainingRow]]


def _pieces(rows: Sequence[tuple[int, TrainingRow]], most: float) -> list[_Piece]:
    groups: dict[int, _Piece] = {}
    for index, row in rows:
        groups.setdefault(row.group, []).append((index, row))
    pieces: list[_Piece] = []
    for members in groups.values():
        piece: _Piece = []
        for member in members:
            if piece and _tokens(piece) + len(member[1].tokens) > most:
                pieces.append(piece)
                piece = []
            piece.append(member)
        pieces.append(piece)
    return pieces


def _tokens(piece: _Piece) -> int:
    return sum(len(row.tokens) for _, row in piece)
