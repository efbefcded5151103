"""What is known of each growing row, as columns of numbers: a step touches no row by itself.

Invariant: entry b of every column is about row b of the batch; a row's token number i was drawn with its uniform
number i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echo2.rollout.engines.sampling import draw
from echo2.types import Sampling

NO_TOKEN = -1


class RowTable:
    """count: live rows, the first ones of every column."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self._cuts = False
        device = self._device
        self._length = torch.zeros(0, 1, dtype=torch.int64, device=device)
        """[R, 1] tokens sampled so far"""
        self._limit = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(0, 1, device=device)
        self._top_p = torch.zeros(0, 1, device=device)
        self._stops = torch.zeros(0, 1, dtype=torch.int64, device=device)
        """[R, K] stop tokens, NO_TOKEN where there are fewer"""
        self._uniforms = torch.zeros(0, 1, dtype=torch.float64, device=device)
        """[R, U]; U: the longest limit"""
        self._tokens = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, 1, device=device)

    def add(self, sampling: Sampling, limit: int, uniforms: Sequence[Tensor]) -> None:
        """Rows of one group; uniforms: [limit] float64 of each."""
        more = len(uniforms)
        stops = list(sampling.stop_token_ids) or [NO_TOKEN]
        self._reach(self.count + more, limit, len(stops))
        rows = slice(self.count, self.count + more)
        self._length[rows], self._limit[rows] = 0, limit
        self._temperature[rows], self._top_p[rows] = sampling.temperature, sampling.top_p
        self._stops[rows] = NO_TOKEN
        self._stops[rows, : len(stops)] = torch.tensor(stops, device=self._device)
        self._uniforms[rows, :limit] = torch.stack(tuple(uniforms)).to(self._device)
        self.count += more
        self._cuts = self._cuts or sampling.top_p < 1

    def sample(self, logits: Tensor, first: int = 0) -> list[int]:
        """Draw a token for each row from ``first`` on, [B − first, V]; returns the rows that ended with theirs."""
        rows = slice(first, self.count)
        length = self._length[rows]
        uniform = self._uniforms[rows].gather(1, length)
        tokens, logprobs = draw(logits, self._temperature[rows], self._top_p[rows], uniform, cut=self._cuts)
        tokens = tokens.unsqueeze(1)
        self._tokens[rows].scatter_(1, length, tokens)
        self._logprobs[rows].scatter_(1, length, logprobs.unsqueeze(1))
        length += 1
        ended = (tokens == self._stops[rows]).any(1, keepdim=True) | (length >= self._limit[rows])
        return [first + row for row in ended.squeeze(1).nonzero().squeeze(1).tolist()]

    @property
    def newest(self) -> Tensor:
        """[B, 1] each row's last token"""
        return self._tokens[: self.count].gather(1, self._length[: self.count] - 1)

    def length(self, row: int) -> int:
        return int(self._length[row])

    def tokens(self, row: int) -> list[int]:
        sampled: list[int] = self._tokens[row, : self.length(row)].tolist()
        return sampled

    def logprobs(self, row: int) -> list[float]:
        values: list[float] = self._logprobs[row, : self.length(row)].tolist()
        return values

    def order(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        source = torch.tensor(rows, dtype=torch.int64, device=self._device)
        for column in self._columns():
            column[: len(rows)] = column[source]
        self.count = len(rows)

    def _columns(self) -> tuple[Tensor, ...]:
        return (
            self._length, self._limit, self._temperature, self._top_p,
            self._stops, self._uniforms, self._tokens, self._logprobs,
        )  # fmt: skip

    def _reach(self, rows: int, limit: int, stops: int) -> None:
        """Make the columns long and wide enough."""
        height = max(rows, 2 * self._length.shape[0]) if rows > self._length.shape[0] else self._length.shape[0]
        wide, many = max(limit, self._tokens.shape[1]), max(stops, self._stops.shape[1])
        if (height, wide, many) == (self._length.shape[0], self._tokens.shape[1], self._stops.shape[1]):
            return
        self._length, self._limit = self._grown(self._length, height, 1), self._grown(self._limit, height, 1)
        self._temperature = self._grown(self._temperature, height, 1)
        self._top_p = self._grown(self._top_p, height, 1)
        self._stops = self._grown(self._stops, height, many, NO_TOKEN)
        self._uniforms = self._grown(self._uniforms, height, wide)
        self._tokens = self._grown(self._tokens, height, wide)
        self._logprobs = self._grown(self._logprobs, height, wide)

    def _grown(self, column: Tensor, height: int, width: int, filled: int = 0) -> Tensor:
        grown = column.new_full((height, width), filled)
        grown[: column.shape[0], : column.shape[1]] = column
        return grown
