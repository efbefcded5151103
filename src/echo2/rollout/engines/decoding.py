"""Continuous batching: the replies of several groups grow together, one token per step.

Invariant: a row's cache holds exactly its own prompt and sampled tokens; left padding that aligns groups of different
lengths is masked out and takes no position. Finished rows leave the batch at once. Nothing here waits or locks: one
thread owns a ``DecodeBatch``.

    Generation ──admit: prompt prefilled once, cache repeated n times──▶ rows ──step: draw, forward──▶ … ──▶ finished
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from echo2.errors import EngineError
from echo2.rollout.engine import Completion, policy_span
from echo2.rollout.engines.sampling import draw, uniforms
from echo2.types import FinishReason, Policy, Sampling


class Row:
    """One growing reply."""

    def __init__(self, sampling: Sampling, index: int, limit: int) -> None:
        self.sampling = sampling
        self.limit = limit
        self.uniforms: list[float] = uniforms(sampling.seed, index, limit).tolist()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.policies: list[Policy] = []
        self.finish: FinishReason | None = None

    def append(self, token: int, logprob: float, policy: Policy) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.policies.append(policy)
        if token in self.sampling.stop_token_ids:
            self.finish = FinishReason.STOP
        elif len(self.token_ids) == self.limit:
            self.finish = FinishReason.LENGTH

    def completion(self) -> Completion:
        assert self.finish is not None, "only a finished row is a completion"
        oldest, newest, versions = policy_span(self.policies)
        return Completion(tuple(self.token_ids), tuple(self.logprobs), oldest, newest, self.finish, versions)


class Generation:
    """One call of ``generate``: a prompt and its n rows. ``failure`` or all rows finished ends it."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, n: int, context: int) -> None:
        limit = min(sampling.max_new_tokens, context - len(prompt))
        if not prompt or limit < 1:
            raise EngineError(f"a prompt must have 1 to {context - 1} tokens (context {context}), it has {len(prompt)}")
        if n < 1 or sampling.temperature <= 0 or not 0 < sampling.top_p <= 1:
            raise EngineError(f"a group must have n >= 1, temperature > 0 and 0 < top_p <= 1, got {n} and {sampling}")
        self.prompt = list(prompt)
        self.rows = [Row(sampling, index, limit) for index in range(n)]
        self.failure: EngineError | None = None
        self.withdrawn = False

    @property
    def live(self) -> list[Row]:
        return [row for row in self.rows if row.finish is None]

    @property
    def ended(self) -> bool:
        return self.failure is not None or all(row.finish is not None for row in self.rows)


class DecodeBatch:
    """The rows that are growing now. Attributes below are aligned: batch position b is one row."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        # The cache's argument was renamed during the life of transformers 5.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "past_key_values" if "cache" not in parameters else "cache"
        # Only plain layers can be padded on the left; a model with windows or states runs one group at a time.
        self._mergeable = all(type(layer) is DynamicLayer for layer in self._new_cache().layers)
        self._generations: list[Generation] = []
        self.clear()

    def clear(self) -> None:
        self._cache: Any = None
        self._rows: list[Row] = []
        self._logits = torch.empty(0)
        """[B, V] float32, of the next token."""
        self._padding: list[int] = []
        """[B] masked columns on the left of each row's cache."""

    @property
    def running(self) -> list[Generation]:
        return list(self._generations)

    @property
    def can_admit(self) -> bool:
        return self._mergeable or not self._rows

    def admit(self, generation: Generation) -> None:
        """Prefill the prompt once and add the generation's rows. A failure takes down this generation only."""
        try:
            cache, logits = self._prefill(torch.tensor([generation.prompt]))
            cache.batch_repeat_interleave(len(generation.rows))
        except Exception as error:
            generation.failure = _failure("reading a prompt", error)
            return
        self._generations.append(generation)
        self._join(cache, logits.expand(len(generation.rows), -1), generation.rows, len(generation.prompt))

    def step(self, policy: Policy) -> None:
        """Sample one token for every row under ``policy``, whose logits are at hand, and run the model on them."""
        self._drop_withdrawn()
        if not self._rows:
            return
        try:
            self._sample(policy)
            self._keep([b for b, row in enumerate(self._rows) if row.finish is None])
            if self._rows:
                self._logits = self._forward(torch.tensor([[row.token_ids[-1]] for row in self._rows]))
        except Exception as error:
            self.fail(_failure("decoding", error))
        self._generations = [generation for generation in self._generations if not generation.ended]

    def fail(self, failure: EngineError) -> None:
        for generation in self._generations:
            generation.failure = failure
        self._generations = []
        self.clear()

    def rebuild(self) -> None:
        """Recompute every cache under the model's present weights: rows go on where they were."""
        self._drop_withdrawn()
        generations, self._generations = self._generations, []
        self.clear()
        for generation in generations:
            rows = generation.live
            # Rows of one generation have sampled equally many tokens, so this batch needs no padding.
            tokens = torch.tensor([generation.prompt + row.token_ids for row in rows])
            try:
                cache, logits = self._prefill(tokens)
            except Exception as error:
                generation.failure = _failure("recomputing a cache", error)
                continue
            self._generations.append(generation)
            self._join(cache, logits, rows, tokens.shape[1])

    # ---- one batch ---------------------------------------------------------------------------------------------

    def _sample(self, policy: Policy) -> None:
        temperature = torch.tensor([[row.sampling.temperature] for row in self._rows], device=self._device)
        top_p = torch.tensor([[row.sampling.top_p] for row in self._rows], device=self._device)
        uniform = torch.tensor([[row.uniforms[len(row.token_ids)]] for row in self._rows], dtype=torch.float64)
        tokens, logprobs = draw(self._logits, temperature, top_p, uniform.to(self._device))
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.append(token, logprob, policy)

    def _drop_withdrawn(self) -> None:
        gone = [generation for generation in self._generations if generation.withdrawn]
        if gone:
            rows = {id(row) for generation in gone for row in generation.rows}
            self._generations = [generation for generation in self._generations if not generation.withdrawn]
            self._keep([b for b, row in enumerate(self._rows) if id(row) not in rows])

    def _keep(self, positions: list[int]) -> None:
        if len(positions) == len(self._rows):
            return
        if not positions:
            self.clear()
            return
        self._cache.batch_select_indices(torch.tensor(positions, device=self._device))
        self._rows = [self._rows[b] for b in positions]
        self._padding = [self._padding[b] for b in positions]
        self._logits = self._logits[positions]
        shared = min(self._padding)
        if shared:
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, shared:], layer.values[:, :, shared:]
            self._padding = [padding - shared for padding in self._padding]

    def _join(self, cache: Any, logits: Tensor, rows: Sequence[Row], length: int) -> None:
        """Add rows whose cache holds ``length`` tokens each and no padding."""
        if not self._rows:
            self._cache, self._logits, self._rows, self._padding = cache, logits, list(rows), [0] * len(rows)
            return
        held = self._cache.get_seq_length()
        more, fewer = max(length - held, 0), max(held - length, 0)
        for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
            ours.keys = torch.cat([_pad_left(ours.keys, more), _pad_left(theirs.keys, fewer)])
            ours.values = torch.cat([_pad_left(ours.values, more), _pad_left(theirs.values, fewer)])
        self._padding = [padding + more for padding in self._padding] + [fewer] * len(rows)
        self._rows = [*self._rows, *rows]
        self._logits = torch.cat([self._logits, logits])

    # ---- the model ---------------------------------------------------------------------------------------------

    def _new_cache(self) -> Any:
        return DynamicCache(config=self._model.config)

    def _prefill(self, tokens: Tensor) -> tuple[Any, Tensor]:
        """[B, L] → (cache of L tokens, logits [B, V] float32 of the next token)"""
        cache = self._new_cache()
        return cache, self._run(cache, tokens)

    def _forward(self, tokens: Tensor) -> Tensor:
        """[B, 1] → logits [B, V] float32 of the next token; the cache grows by one."""
        if not any(self._padding):
            return self._run(self._cache, tokens)
        held = self._cache.get_seq_length()
        padding = torch.tensor(self._padding, device=self._device).unsqueeze(1)
        mask = torch.arange(held + 1, device=self._device) >= padding
        return self._run(self._cache, tokens, attention_mask=mask.long(), position_ids=held - padding)

    def _run(self, cache: Any, tokens: Tensor, **more: Tensor) -> Tensor:
        arguments = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1, **more}
        output = self._model(input_ids=tokens.to(self._device), **arguments)
        logits: Tensor = output.logits[:, -1].float()
        return logits


def _pad_left(states: Tensor, columns: int) -> Tensor:
    """[B, H, L, D] → [B, H, columns + L, D]"""
    return functional.pad(states, (0, 0, columns, 0)) if columns else states


def _failure(what: str, error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    reason = str(error).strip().splitlines() or [""]
    return EngineError(f"{what} failed: {type(error).__name__}: {reason[0]}")
