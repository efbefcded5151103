"""Continuous batching: the replies of several groups grow together, one token per step.

Invariant: a row's states belong to its own prompt and sampled tokens, its newest token excepted, which the next step
feeds. A finished row leaves at once and the next waiting one takes its place. Nothing here waits or locks: one thread
owns a ``DecodeBatch``.

    Generation ──begin: prompt read once──▶ fill: rows placed, first token drawn ──step: feed, draw──▶ … ──▶ finished
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from echo2.errors import EngineError
from echo2.rollout.engine import Completion, policy_span
from echo2.rollout.engines.reading import Reader
from echo2.rollout.engines.rows import RowTable
from echo2.rollout.engines.sampling import uniforms
from echo2.types import FinishReason, Policy, Sampling

MOST_ROWS = 256
"""Beyond it a step's arithmetic grows as fast as the batch, and nothing is gained by waiting for more rows."""

REREAD_ROWS = 16
"""Rows whose states are recomputed in one go: their logits and activations exist at the same time."""


class Generation:
    """One call of ``generate``: a prompt and its n replies. ``failure`` or all replies there ends it."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, n: int, context: int) -> None:
        limit = min(sampling.max_new_tokens, context - len(prompt))
        if not prompt or limit < 1:
            raise EngineError(f"a prompt must have 1 to {context - 1} tokens (context {context}), it has {len(prompt)}")
        if n < 1 or sampling.temperature <= 0 or not 0 < sampling.top_p <= 1:
            raise EngineError(f"a group must have n >= 1, temperature > 0 and 0 < top_p <= 1, got {n} and {sampling}")
        self.prompt = list(prompt)
        self.sampling = sampling
        self.limit = limit
        self.replies: list[Completion | None] = [None] * n
        self.placed = 0
        """Replies that have begun; the rest waits for places."""
        self.read: tuple[Any, Tensor] | None = None
        """The prompt's states and the logits after it, while replies wait for places."""
        self.news: deque[int] = deque()
        """Replies that ended and were not told yet."""
        self.failure: EngineError | None = None
        self.withdrawn = False
        self._missing = n

    @property
    def ended(self) -> bool:
        return self.failure is not None or not self._missing

    def finish(self, position: int, completion: Completion) -> None:
        self.replies[position] = completion
        self._missing -= 1
        self.news.append(position)


class _Row:
    """One growing reply; its numbers are in the table."""

    def __init__(self, generation: Generation, position: int, policy: Policy) -> None:
        self.generation = generation
        self.position = position
        self.spans = [(0, policy)]
        """(first token, policy that sampled it and what follows), oldest first"""

    def policies(self, length: int) -> list[Policy]:
        ends = [first for first, _ in self.spans[1:]] + [length]
        return [policy for (first, policy), end in zip(self.spans, ends, strict=True) for _ in range(first, end)]


class DecodeBatch:
    """The rows that are growing now: ``_rows[b]``, row b of the table and row b of the reader are the same."""

    def __init__(self, reader: Reader, table: RowTable, states_bytes: int) -> None:
        """states_bytes: what all rows' states may take together; one row is always let in.

        Free places of rows that ended come on top, at most as many as there are rows.
        """
        self._reader, self._table, self._states_bytes = reader, table, states_bytes
        self._generations: list[Generation] = []
        self._rows: list[_Row] = []

    @property
    def running(self) -> list[Generation]:
        return list(self._generations)

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def can_begin(self) -> bool:
        """Whether another group's prompt may be read: all begun ones have their places, and there is one more."""
        if not self._rows:
            return not self._generations
        return self._reader.together and self._generations[-1].read is None and self._free() > 0

    def begin(self, generation: Generation, policy: Policy) -> None:
        """Read the prompt once and place what fits. A failure takes down this generation only."""
        try:
            generation.read = self._reader.read(generation.prompt)
        except Exception as error:
            generation.failure = _failure("reading a prompt", error)
            return
        self._generations.append(generation)
        self.fill(policy)

    def fill(self, policy: Policy) -> None:
        """Give free places to replies of begun groups, and draw their first tokens."""
        self._drop_withdrawn()
        for generation in [one for one in self._generations if one.read is not None]:
            try:
                while generation.read is not None and (free := self._free()) > 0:
                    self._place(generation, free, policy)
            except Exception as error:
                self.fail(_failure("beginning replies", error))
                return
        self._forget_ended()

    def step(self, policy: Policy) -> None:
        """Feed every row its newest token and sample the next one under ``policy``, whose weights are installed."""
        self._drop_withdrawn()
        if not self._rows:
            return
        try:
            self._retire(self._table.sample(self._reader.step(self._table.newest)))
        except Exception as error:
            self.fail(_failure("decoding", error))
        self._forget_ended()

    def fail(self, failure: EngineError) -> None:
        for generation in self._generations:
            generation.failure = failure
        self._generations, self._rows = [], []
        self._table.clear()
        self._reader.clear()

    def rebuild(self, policy: Policy) -> None:
        """Recompute everything under the model's present weights, ``policy``: rows go on where they were."""
        self._drop_withdrawn()
        self._reader.forget()
        order: list[int] = []
        for rows in self._by_length():
            try:
                sampled = [self._rows[row].generation.prompt + self._table.tokens(row)[:-1] for row in rows]
                placed = self._reader.place(self._reader.reread(sampled), 1)
            except Exception as error:
                for row in rows:
                    self._rows[row].generation.failure = _failure("recomputing states", error)
                continue
            together = order + rows
            order = [together[row] for row in placed]
        for row in order:
            self._rows[row].spans.append((self._table.length(row), policy))
        self._reorder(order)
        for generation in self._generations:
            if generation.read is not None and generation.failure is None:
                try:
                    generation.read = self._reader.read(generation.prompt)
                except Exception as error:
                    generation.failure = _failure("reading a prompt", error)
        self._drop_failed()

    # ---- rows --------------------------------------------------------------------------------------------------

    def _free(self) -> int:
        """Places for more rows now; a model that runs one group at a time takes it whole."""
        if not self._reader.together:
            return 0 if self._rows else MOST_ROWS * MOST_ROWS
        longest = max(len(generation.prompt) + generation.limit for generation in self._generations)
        each = max(1, self._reader.bytes_per_token * (longest + self._reader.spare_tokens))
        return min(MOST_ROWS, max(1, self._states_bytes // each)) - len(self._rows)

    def _place(self, generation: Generation, free: int, policy: Policy) -> None:
        assert generation.read is not None, "a begun group with waiting replies has its prompt read"
        states, logits = generation.read
        first, more = generation.placed, min(free, len(generation.replies) - generation.placed)
        before = len(self._rows)
        numbers = range(first, first + more)
        seed, limit = generation.sampling.seed, generation.limit
        self._table.add(generation.sampling, limit, [uniforms(seed, number, limit) for number in numbers])
        self._rows += [_Row(generation, number, policy) for number in numbers]
        ended = self._table.sample(logits.expand(more, -1), before)
        order = self._reader.place(states, more)
        self._reorder(order)
        generation.placed += more
        if generation.placed == len(generation.replies):
            generation.read = None
        self._retire([order.index(number) for number in ended])

    def _retire(self, ended: Sequence[int]) -> None:
        """Turn rows that ended into replies, and close their ranks."""
        for number in ended:
            row, token_ids = self._rows[number], self._table.tokens(number)
            generation = row.generation
            if len(generation.replies) == 1:  # a turn of a conversation: the next prompt will begin with it
                self._reader.keep(generation.prompt + token_ids[:-1], number)
            stopped = token_ids[-1] in generation.sampling.stop_token_ids
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            oldest, newest, versions = policy_span(row.policies(len(token_ids)))
            logprobs = tuple(self._table.logprobs(number))
            generation.finish(row.position, Completion(tuple(token_ids), logprobs, oldest, newest, reason, versions))
        self._remove(ended)

    def _remove(self, gone: Sequence[int]) -> None:
        if gone:
            self._reorder(self._reader.remove(gone))

    def _reorder(self, order: list[int]) -> None:
        if order != list(range(len(self._rows))):
            self._table.order(order)
            self._rows = [self._rows[row] for row in order]

    def _by_length(self) -> list[list[int]]:
        """Rows with equally many tokens, to be recomputed together without padding."""
        alike: dict[int, list[int]] = {}
        for number, row in enumerate(self._rows):
            alike.setdefault(len(row.generation.prompt) + self._table.length(number), []).append(number)
        at_once = REREAD_ROWS if self._reader.together else MOST_ROWS * MOST_ROWS
        return [rows[at : at + at_once] for _, rows in sorted(alike.items()) for at in range(0, len(rows), at_once)]

    def _drop_withdrawn(self) -> None:
        if any(generation.withdrawn for generation in self._generations):
            self._remove([number for number, row in enumerate(self._rows) if row.generation.withdrawn])
            self._generations = [generation for generation in self._generations if not generation.withdrawn]

    def _drop_failed(self) -> None:
        self._remove([number for number, row in enumerate(self._rows) if row.generation.failure is not None])
        self._forget_ended()

    def _forget_ended(self) -> None:
        if any(generation.ended for generation in self._generations):
            self._generations = [generation for generation in self._generations if not generation.ended]


def _failure(what: str, error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    reason = str(error).strip().splitlines() or [""]
    return EngineError(f"{what} failed: {type(error).__name__}: {reason[0]}")
