"""The embedded engine on weights that a learner in the same process trains.

Invariant: there is one copy of the weights. The engine's model is a second frame around the learner's tensors, which
the optimizer changes in place; training takes the engine's turn, like a switch of weights that lasts. What a
``torch.autocast`` casts for one product is gone after it.

The learner's own model stays as it is: the engine attends in its own way (``attention.py``), training in another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo2.errors import EngineError
from echo2.rollout.alternation import Alternation
from echo2.rollout.engine import ActivationMode
from echo2.rollout.engines.transformers import TransformersEngine, empty_model
from echo2.types import Policy


class SharedEngine(TransformersEngine):
    """Implements ``ResidentEngine``: ``lend`` and ``settle`` are for the learner."""

    def __init__(
        self, model_dir: Path, weights: Mapping[str, Tensor], *, computes_in: torch.dtype, threads: int = 0
    ) -> None:
        """weights: the learner's, by name, tied ones under every name.  computes_in: as the learner's passes do."""
        self._weights = weights
        self._computes_in = computes_in
        self._turns = Alternation()
        self._lent = False
        """The learner holds the engine's turn; not before the first policy, when nobody could."""
        self._settled = asyncio.Event()
        device = next(iter(weights.values())).device
        super().__init__(model_dir, device=str(device), threads=threads, dtype="float32")

    def _built(self, model_dir: Path) -> Any:
        # Its own tensors are never written, so in host memory they take none; then the learner's take their place.
        model = empty_model(model_dir, torch.device("cpu"), torch.float32)
        model.load_state_dict(self._weights, assign=True)
        model.tie_weights()
        return model.to(self._device).requires_grad_(False)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._computes_in

    # ---- turns of the learner ----------------------------------------------------------------------------------

    async def lend(self) -> None:
        """Wait until every reply that has begun has ended; then the weights are the caller's until ``settle``.

        What replies left behind is freed, for the gradients. Returns at once while the weights are lent.
        """
        if self._closed or not self._turns.ask():
            return
        self._switching += 1
        await self._turn.acquire()
        self._lent = True
        while self._batch.running:
            await self._in_thread(self._advance)
            self._wake()
        await self._in_thread(self._forget)
        self._turns.emptied()

    def settle(self, policy: Policy) -> None:
        """The weights are ``policy``, complete and known to the coordinator: generate with them."""
        if self._closed:
            return
        self._turns.settle(policy)
        self._installed = policy
        if self._lent:
            self._switching -= 1
            self._take_back()
            self._hand_on()
        settled, self._settled = self._settled, asyncio.Event()
        settled.set()

    async def settled(self, after: Policy | None) -> Policy:
        while (policy := self._installed) is None or (after is not None and policy <= after):
            await self._settled.wait()
        return policy

    def _take_back(self) -> None:
        self._lent = False
        self._turn.release()

    async def close(self) -> None:
        """For when the learner's program is over: what it still holds it will not give back."""
        if self._lent:
            self._take_back()
        await super().close()

    # ---- snapshots have no say ---------------------------------------------------------------------------------

    async def prefetch(self, policy: Policy, folder: Path) -> None:
        raise EngineError(f"policy {policy} cannot be loaded: the weights are the learner's, which trains them")

    async def activate(self, policy: Policy, mode: ActivationMode = ActivationMode.DRAIN) -> None:
        if policy != self._installed:
            raise EngineError(f"policy {policy} cannot be activated: the weights are {self._installed}, the learner's")

    # ---- in the engine's thread --------------------------------------------------------------------------------

    def _advance(self) -> None:
        assert self._turns.may_sample, "the weights are lent"
        casts = self._computes_in is not torch.float32
        with torch.autocast(self._device.type, dtype=self._computes_in, enabled=casts, cache_enabled=False):
            super()._advance()

    @torch.inference_mode()
    def _forget(self) -> None:
        assert self._installed is not None, "only settled weights are asked for"
        self._batch.rebuild(self._installed)
