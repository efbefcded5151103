"""The embedded engine: a Hugging Face causal LM on CPU or GPU.

Invariant: one thread touches the model, one caller at a time drives it. Of those who wait for a result one has the
turn: it lets the thread take a few decode steps of the whole batch, tells the others what is theirs, and hands the turn
on when its own result is there; so groups that overlap grow together and the event loop stays free. Weights are
switched in a turn of their own; a snapshot loaded aside is whole and fits before that turn is asked for.

    generate ──▶ waiting ──begin──▶ DecodeBatch ──turns──▶ replies
    prefetch ──▶ loaded aside ──activate: drain | continue | abort──▶ installed
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from echo2.cores import own_threads
from echo2.errors import EngineError, UserError
from echo2.rollout.engine import ActivationMode, Capabilities, Completion, Heard
from echo2.rollout.engines.decoding import DecodeBatch, Generation
from echo2.rollout.engines.reading import reader_for
from echo2.rollout.engines.rows import RowTable
from echo2.rollout.engines.weights import compute_dtype, install_weights, read_weights
from echo2.types import Policy, Sampling

T = TypeVar("T")

UNBOUNDED_CONTEXT = 1 << 20
"""For models that state no context length."""

STEPS_PER_TURN = 8
"""Decode steps between two looks at the event loop where nobody waits for one; a switch is never kept longer."""

STATES_SHARE, PREFIX_SHARE = 1 / 4, 1 / 8
"""Of the memory that is free when the engine is built: for keys and values of growing rows, and of known prefixes."""


class TransformersEngine:
    """model_dir holds config.json; ``dtype`` is the element type of the run's snapshots.

    threads: CPU threads; 0 for as many as this process may use.
    """

    def __init__(self, model_dir: Path, *, device: str = "auto", threads: int = 0, dtype: str = "bfloat16") -> None:
        self._device = _pick_device(device)
        self._dtype = dtype
        self._model = self._built(model_dir)
        # Entries share storage with the parameters, tied ones under every name: what is copied in is installed.
        self._targets: dict[str, Tensor] = self._model.state_dict()
        self._context = _context_length(self._model.config)
        free_bytes = _free_bytes(self._device)
        self._batch = DecodeBatch(
            reader_for(self._model, self._device, int(PREFIX_SHARE * free_bytes)),
            RowTable(self._device),
            int(STATES_SHARE * free_bytes),
        )
        self._waiting: deque[Generation] = deque()
        self._open: dict[Generation, asyncio.Event] = {}
        """Every call of ``generate``, and what wakes it: news of its own, or its turn."""
        self._aside: tuple[Policy, dict[str, Tensor]] | None = None
        self._installed: Policy | None = None
        self._closed = False
        self._switching = 0
        self._turn = asyncio.Lock()
        # OpenMP counts threads per calling thread, so the number is set inside the one that computes.
        self._thread = ThreadPoolExecutor(1, "engine", torch.set_num_threads, (threads or own_threads(),))
        self._loader = ThreadPoolExecutor(1, "engine-loader")

    def _built(self, model_dir: Path) -> Any:
        return empty_model(model_dir, self._device, compute_dtype(self._dtype, self._device))

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
        return "the engine was closed" if self._closed else None

    async def mend(self) -> None:
        if (fault := self.fault) is not None:
            raise EngineError(fault)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        if self._installed is None:
            raise EngineError("a policy must be installed before anything is generated; activate one first")
        generation = Generation(token_ids, sampling, n, self._context)
        self._waiting.append(generation)
        woken = self._open[generation] = asyncio.Event()
        try:
            while not generation.ended:
                if self._turn.locked() or self._switching:
                    await woken.wait()
                    woken.clear()
                else:
                    await self._drive(generation, heard)
                _tell(generation, heard)
        finally:
            generation.withdrawn = True
            del self._open[generation]
            self._hand_on()
        if generation.failure is not None:
            raise generation.failure
        return [reply for reply in generation.replies if reply is not None]

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
            async with self._turn:
                while mode is ActivationMode.DRAIN and self._batch.running:
                    await self._in_thread(self._advance)
                    self._wake()
                await self._in_thread(lambda: self._switch(policy, weights, mode))
                self._wake()
        finally:
            self._switching -= 1
            self._hand_on()

    async def close(self) -> None:
        """Wait for the running step; later calls fail."""
        self._switching += 1  # whoever drives stops for it
        async with self._turn:
            self._installed, self._closed = None, True
            await self._in_thread(lambda: self._abandon(EngineError("the engine was closed")))
            self._wake()
        self._thread.shutdown(wait=False)
        self._loader.shutdown(wait=False)

    # ---- turns -------------------------------------------------------------------------------------------------

    async def _drive(self, generation: Generation, heard: Heard | None) -> None:
        async with self._turn:
            while not generation.ended and not self._switching:
                await self._in_thread(self._advance)
                self._wake()
                _tell(generation, heard)

    def _wake(self) -> None:
        """Wake the callers that a turn brought something."""
        for generation, woken in self._open.items():
            if generation.news or generation.ended:
                woken.set()

    def _hand_on(self) -> None:
        """Let somebody else drive, when nobody does."""
        if not self._turn.locked() and not self._switching and self._open:
            next(iter(self._open.values())).set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run ``work`` where the model lives. A cancelled caller's step still ends before the next one begins."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ---- in the engine's thread --------------------------------------------------------------------------------

    @torch.inference_mode()
    def _advance(self) -> None:
        """One turn: begin what may begin, then some steps for every row, until there is something to tell."""
        assert self._installed is not None, "generations are only taken after the first install"
        for _ in range(STEPS_PER_TURN):
            self._batch.fill(self._installed)
            while self._waiting and not self._switching and self._batch.can_begin:
                generation = self._waiting.popleft()
                if not generation.withdrawn:
                    self._batch.begin(generation, self._installed)
            self._batch.step(self._installed)
            if self._switching or any(generation.news or generation.ended for generation in tuple(self._open)):
                return

    @torch.inference_mode()
    def _switch(self, policy: Policy, weights: dict[str, Tensor], mode: ActivationMode) -> None:
        if mode is ActivationMode.ABORT:
            self._batch.fail(EngineError(f"aborted: policy {policy} was activated"))
        install_weights(self._targets, weights)
        self._installed = policy
        self._aside = None
        self._batch.rebuild(policy)

    @torch.inference_mode()
    def _abandon(self, failure: EngineError) -> None:
        while self._waiting:
            self._waiting.popleft().failure = failure
        self._batch.fail(failure)


def _tell(generation: Generation, heard: Heard | None) -> None:
    while generation.news:
        position = generation.news.popleft()
        reply = generation.replies[position]
        if heard is not None and reply is not None:
            heard(position, reply)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # systems that do not tell
        return 4 << 30


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


def empty_model(model_dir: Path, device: torch.device, dtype: torch.dtype) -> Any:
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
