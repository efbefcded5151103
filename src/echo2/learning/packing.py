"""Rows packed into sheets, sheets into micro-batches.

Invariant: packing changes the cost, never the numbers. On a sheet the tokens that several rows begin with stand once,
followed by each row's own tokens (a branch); a token sees the shared tokens and its own branch before it, at the
positions it would have alone. A group of n replies so costs one prompt instead of n. Where that would cost more (long
replies meet each other in a dense mask, a game's turns above all), each row has a sheet of its own.

    tokens     p0 p1 p2 | a3 a4 | b3 b4 b5
    positions   0  1  2 |  3  4 |  3  4  5
    branch      0  0  0 |  1  1 |  2  2  2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2.learning.batch import TrainingRow

LONGEST_SHARED_SHEET = 4096
"""Tokens of a sheet with several branches: its dense attention mask takes length² bytes, and a long reply costs more
than the prompt it would share."""


@dataclass(frozen=True)
class Sheet:
    """[L] arrays of one sequence for the model, and the targets read off it."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    branch: NDArray[np.int64]
    rows: tuple[TrainingRow, ...]
    sources: NDArray[np.int64]
    """[T] where the hidden state that predicts each target stands; row by row, in token order"""

    @property
    def branches(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class MicroBatch:
    """Sheets padded on the right to one shape [B, L], with their T targets."""

    tokens: Tensor
    """[B, L] int64"""
    positions: Tensor
    """[B, L] int64; without a mask they go on through padding, as of one sequence"""
    visible: Tensor | None
    """[B, 1, L, L] bool, query by key; None where each sheet has one branch: causal attention says it all"""
    real: Tensor
    """[B, L] int64: 0 at padding"""
    sheet: Tensor
    """[T] int64 row of ``tokens`` a target is on"""
    source: Tensor
    """[T] int64 column of the hidden state that predicts it"""
    target: Tensor
    """[T] int64 token id"""
    temperature: Tensor
    """[T] float32"""
    advantages: Tensor
    """[T] float32"""
    behaviour: Tensor
    """[T] float32; 0 where not ``known``"""
    known: Tensor
    """[T] bool"""
    current: Tensor
    """[T] bool"""
    nucleus: Tensor
    """[T] bool"""
    members: tuple[TrainingRow, ...]
    """[N] the rows, in the order of their targets"""
    lengths: Tensor
    """[N] int64 targets of each row, at least 1; a row's targets are neighbours, in token order"""
    group: Tensor
    """[N] int64 number of each row's group"""

    @property
    def targets(self) -> int:
        return self.target.numel()

    @property
    def rows(self) -> int:
        return self.lengths.numel()

    def to(self, device: torch.device) -> MicroBatch:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def pack(
    rows: Sequence[TrainingRow], *, budget: int, share_prefixes: bool, pairs_per_token: float = inf
) -> list[MicroBatch]:
    """Micro-batches of at most ``budget`` padded tokens (more where one row alone is longer); rows without target cost
    nothing and are left out. Sorted by length, longest first, so padding is small and memory peaks at once.

    pairs_per_token: attended pairs that cost as much as a token's matrix products; ``inf``: only tokens cost.
    """
    trainable = [row for row in rows if row.loss.any()]
    sheets = _sheets(trainable, min(budget, LONGEST_SHARED_SHEET), share_prefixes, pairs_per_token)
    sheets.sort(key=lambda sheet: -len(sheet.tokens))
    batches: list[MicroBatch] = []
    first = 0
    while first < len(sheets):
        fit = max(1, budget // len(sheets[first].tokens))
        batches.append(_micro_batch(sheets[first : first + fit]))
        first += fit
    return batches


def empty_micro_batch() -> MicroBatch:
    """One token and no target: what a rank computes while others still have micro-batches."""
    nothing = np.zeros(1, np.int64)
    row = TrainingRow(0, nothing, np.zeros(1, np.bool_), None, 0.0, 1.0, current=True, nucleus=False)
    return _micro_batch([_sheet([row], 1)])


def _sheets(rows: Sequence[TrainingRow], longest: int, share_prefixes: bool, pairs_per_token: float) -> list[Sheet]:
    if not share_prefixes:
        return _alone(rows)
    groups: dict[int, list[TrainingRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    sheets = []
    for members in groups.values():
        alone = _alone(members)
        together = _together(members, longest)
        sheets += min(together, alone, key=lambda ways: sum(_cost(sheet, pairs_per_token) for sheet in ways))
    return sheets


def _alone(rows: Sequence[TrainingRow]) -> list[Sheet]:
    return [_sheet([row], len(row.tokens)) for row in rows]


def _together(members: Sequence[TrainingRow], longest: int) -> list[Sheet]:
    """Sheets of at most ``longest`` tokens on which the rows share what all of them begin with."""
    shared = _shared_prefix(members)
    if shared == 0:
        return _alone(members)
    sheets: list[Sheet] = []
    together: list[TrainingRow] = []
    length = shared
    for row in members:
        own = len(row.tokens) - shared
        if together and length + own > longest:
            sheets.append(_sheet(together, shared))
            together, length = [], shared
        together.append(row)
        length += own
    sheets.append(_sheet(together, shared))
    return sheets


def _cost(sheet: Sheet, pairs_per_token: float) -> float:
    """In tokens. A dense mask has every pair computed, causal attention the half."""
    length = len(sheet.tokens)
    return length + length**2 * (1.0 if sheet.branches > 1 else 0.5) / pairs_per_token


def _shared_prefix(rows: Sequence[TrainingRow]) -> int:
    """Tokens all rows begin with, before anyone's first target."""
    shared = min(int(row.loss.argmax()) for row in rows)
    head = rows[0].tokens[:shared]
    for row in rows[1:]:
        differs = np.flatnonzero(row.tokens[: len(head)] != head)
        head = head[: int(differs[0])] if differs.size else head
    return len(head)


def _sheet(rows: Sequence[TrainingRow], shared: int) -> Sheet:
    if len(rows) == 1:
        shared = len(rows[0].tokens)
    tokens, positions = [rows[0].tokens[:shared]], [np.arange(shared)]
    branch, sources = [np.zeros(shared, np.int64)], []
    end = shared
    for number, row in enumerate(rows, start=1):
        own = row.tokens[shared:]
        before_target = np.flatnonzero(row.loss) - 1
        sources.append(np.where(before_target < shared, before_target, before_target - shared + end))
        tokens.append(own)
        positions.append(np.arange(shared, len(row.tokens)))
        branch.append(np.full(len(own), number, np.int64))
        end += len(own)
    return Sheet(
        np.concatenate(tokens), np.concatenate(positions), np.concatenate(branch), tuple(rows), np.concatenate(sources)
    )


def _micro_batch(sheets: Sequence[Sheet]) -> MicroBatch:
    shape = (len(sheets), max(len(sheet.tokens) for sheet in sheets))
    tokens, real = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    shared = any(sheet.branches > 1 for sheet in sheets)
    # Padding comes last, so nothing real sees it and causal attention needs no mask, which would be quadratic: but
    # positions that begin again at 0 would be taken for another sequence, and masked as one.
    positions = np.zeros(shape, np.int64) if shared else np.tile(np.arange(shape[1]), (shape[0], 1))
    branch = np.full(shape, -1, np.int64)
    for i, sheet in enumerate(sheets):
        length = len(sheet.tokens)
        tokens[i, :length], positions[i, :length], branch[i, :length] = sheet.tokens, sheet.positions, sheet.branch
        real[i, :length] = 1
    rows = [row for sheet in sheets for row in sheet.rows]
    counts = [row.targets for row in rows]

    def per_target(values: Sequence[float | bool], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(counts))

    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        visible=_visibility(torch.from_numpy(branch)) if shared else None,
        real=torch.from_numpy(real),
        sheet=torch.from_numpy(np.repeat(np.arange(len(sheets)), [len(sheet.sources) for sheet in sheets])),
        source=torch.from_numpy(np.concatenate([sheet.sources for sheet in sheets])),
        target=torch.from_numpy(np.concatenate([row.tokens[row.loss] for row in rows])),
        temperature=per_target([row.temperature for row in rows], torch.float32),
        advantages=per_target([row.advantage for row in rows], torch.float32),
        behaviour=torch.from_numpy(np.concatenate([_behaviour(row) for row in rows])),
        known=per_target([row.behaviour is not None for row in rows], torch.bool),
        current=per_target([row.current for row in rows], torch.bool),
        nucleus=per_target([row.nucleus for row in rows], torch.bool),
        members=tuple(rows),
        lengths=torch.tensor(counts),
        group=torch.tensor([row.group for row in rows]),
    )


def _behaviour(row: TrainingRow) -> NDArray[np.float32]:
    return np.zeros(row.targets, np.float32) if row.behaviour is None else row.behaviour[row.loss]


def _visibility(branch: Tensor) -> Tensor:
    """[B, L] branch numbers, -1 at padding → [B, 1, L, L] query by key. Padding sees itself, so that no row of the
    attention is empty (an empty softmax is NaN); nothing real sees padding, which comes last."""
    length = branch.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = branch[:, :, None] == branch[:, None, :]
    shared = (branch == 0)[:, None, :]
    return (causal & (same | shared))[:, None]
