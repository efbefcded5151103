"""The embedded engine: a Hugging Face causal LM on CPU or GPU.

Invariant: one thread touches the model. Whoever waits for a result takes turns at driving it: a turn is one decode step
of the whole batch, so groups that arrive together grow together and the event loop stays free. Weights are switched in
a turn of their own; a snapshot loaded aside is whole and fits before that turn is asked for.

    generate ──▶ waiting ──admit──▶ DecodeBatch ──turns──▶ completions
    prefetch ──▶ loaded aside ──activate: drain | continue | abort──▶ installed
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from echo2.errors import EngineError, UserError
from echo2.rollout.engine import ActivationMode, Capabilities, Completion, Heard
from echo2.rollout.engines.decoding import DecodeBatch, Generation
from echo2.rollout.engines.weights import compute_dtype, install_weights, read_weights
from echo2.types import Policy, Sampling

T = TypeVar("T")

UNBOUNDED_CONTEXT = 1 << 20
"""For models that state no context length."""


class TransformersEngine:
    """model_dir holds config.json; ``dtype`` is the element type of the run's snapshots."""

    def __init__(self, model_dir: Path, *, device: str = "auto", threads: int = 0, dtype: str = "bfloat16") -> None:
        self._device = _pick_device(device)
        self._dtype = dtype
        self._model = _empty_model(model_dir, self._device, compute_dtype(dtype, self._device))
        # Entries share storage with the parameters, tied ones under every name: what is copied in is installed.
        self._targets: dict[str, Tensor] = self._model.state_dict()
        self._context = _context_length(self._model.config)
        self._batch = DecodeBatch(self._model, self._device)
        self._waiting: deque[Generation] = deque()
        self._aside: tuple[Policy, dict[str, Tensor]] | None = None
        self._installed: Policy | None = None
        self._fault: str | None = None
        self._switching = 0
        self._turn = asyncio.Lock()
        # OpenMP counts threads per calling thread, so the number is set inside the one that computes.
        self._thread = ThreadPoolExecutor(1, "engine", _set_threads, (threads,))
        self._loader = ThreadPoolExecutor(1, "engine-loader")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=True, token_in=True, modes=frozenset(ActivationMode))

    @property
    def installed(self) -> Policy | None:
        return self._installed

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the model computes in: the snapshots' type, or float32 where the CPU has no arithmetic for it."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def fault(self) -> str | None:
        return self._fault

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        if self._installed is None:
            raise EngineError("a policy must be installed before anything is generated; activate one first")
        generation = Generation(token_ids, sampling, n, self._context)
        self._waiting.append(generation)
        try:
            while not generation.ended:
                async with self._turn:
                    if not generation.ended:
                        await self._in_thread(self._advance)
        finally:
            generation.withdrawn = True
        if generation.failure is not None:
            raise generation.failure
        group = [row.completion() for row in generation.rows]
        if heard is not None:
            for position, completion in enumerate(group):
                heard(position, completion)
        return group

    async def prefetch(self, policy: Policy, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        weights = await loop.run_in_executor(self._loader, read_weights, folder, policy, self._targets, self._dtype)
        self._aside = (policy, weights)

    async def activate(self, policy: Policy, mode: ActivationMode = ActivationMode.DRAIN) -> None:
        if policy == self._installed:
            return
        if self._aside is None or self._aside[0] != policy:
            raise EngineError(f"policy {policy} must be prefetched before it is activated")
        weights = self._aside[1]
        self._switching += 1
        try:
            while True:
                async with self._turn:
                    if mode is ActivationMode.DRAIN and self._batch.running:
                        await self._in_thread(self._advance)
                        continue
                    await self._in_thread(lambda: self._switch(policy, weights, mode))
                    return
        finally:
            self._switching -= 1

    async def close(self) -> None:
        """Wait for the running step; later calls fail."""
        async with self._turn:
            self._installed = None
            await self._in_thread(lambda: self._abandon(EngineError("the engine was closed")))
        self._thread.shutdown(wait=False)
        self._loader.shutdown(wait=False)

    # ---- in the engine's thread --------------------------------------------------------------------------------

    @torch.inference_mode()
    def _advance(self) -> None:
        """One turn: admit what may be admitted, then one step for every row."""
        assert self._installed is not None, "generations are only taken after the first install"
        while self._waiting and not self._switching and self._batch.can_admit:
            generation = self._waiting.popleft()
            if not generation.withdrawn:
                self._batch.admit(generation)
        self._batch.step(self._installed)

    @torch.inference_mode()
    def _switch(self, policy: Policy, weights: dict[str, Tensor], mode: ActivationMode) -> None:
        if mode is ActivationMode.ABORT:
            self._batch.fail(EngineError(f"aborted: policy {policy} was activated"))
        install_weights(self._targets, weights)
        self._installed = policy
        self._aside = None
        self._batch.rebuild()

    def _abandon(self, failure: EngineError) -> None:
        while self._waiting:
            self._waiting.popleft().failure = failure
        self._batch.fail(failure)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run ``work`` where the model lives. A cancelled caller's step still ends before the next one begins."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"a device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device} must exist, and this machine has {torch.cuda.device_count()} GPUs; use cpu")
    return chosen


def _empty_model(model_dir: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The architecture with weights to be overwritten; buffers that are computed (rotary tables) are real."""
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with device, no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{model_dir} must hold the config.json of a causal language model: {reason[0]}") from error
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _context_length(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or UNBOUNDED_CONTEXT)
