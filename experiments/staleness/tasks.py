"""The two tasks, and the model small enough to learn them in half a minute of one core.

Invariant: prompts, version 0 and the held-out prompts follow from the task and the seed alone, so that cells of one
seed begin with the same bits and see the same prompts in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.durable import ASIDE
from echo2.learning.policy_model import PolicyModel
from echo2.learning.warm_start import GoldTalk, warm_start

ASK, END = 10, 11
"""Token ids after the ten digits: the end of the question, and of the answer."""
VOCABULARY = 12


@dataclass(frozen=True)
class Task:
    name: str
    digits: int
    """Of a question, and of its answer."""
    answer: Callable[[Sequence[int]], list[int]]
    warm_steps: int
    """Supervised steps that make version 0: it answers a question now and then."""
    lr: float
    """Of the learning steps."""

    def prompt(self, question: Sequence[int]) -> list[int]:
        return [*question, ASK]

    def gold(self, question: Sequence[int]) -> list[int]:
        return [*self.answer(question), END]

    @property
    def longest_reply(self) -> int:
        return self.digits + 1

    def reward(self, question: Sequence[int], reply: Sequence[int]) -> float:
        """1 for the whole answer and its end, else 0."""
        return float(list(reply) == self.gold(question))

    def questions(self, count: int, *stream: int) -> list[list[int]]:
        """[count] of so many digits, as the numbers of the stream say."""
        drawn: list[list[int]] = np.random.default_rng(stream).integers(0, 10, (count, self.digits)).tolist()
        return drawn


TASKS = {
    task.name: task
    for task in (
        Task("sort", digits=4, answer=sorted, warm_steps=40, lr=6e-4),
        Task("reverse", digits=4, answer=lambda question: [*reversed(question)], warm_steps=65, lr=6e-4),
    )
}
WARM_BATCH, WARM_LR = 64, 2e-3
WARM, TRAINED, HELD_OUT = range(3)
"""Streams of questions."""


def fresh_model(seed: int) -> Qwen3ForCausalLM:
    """Random float32 weights of the seed."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def version_0(task: Task, seed: int, models: Path) -> PolicyModel:
    """The warm-started policy; kept in ``models``, where it is made once."""
    kept = models / f"{task.name}-{seed}.safetensors"
    policy = PolicyModel(fresh_model(seed), compute_dtype="float32", logits_chunk_tokens=0)
    if not kept.exists():
        warm_start(
            policy, lambda step: _talks(task, seed, step), steps=task.warm_steps, lr=WARM_LR, micro_batch_tokens=16384
        )
        models.mkdir(parents=True, exist_ok=True)
        aside = kept.with_name(f"{kept.name}.{os.getpid()}{ASIDE}")  # two shares may make the same at once
        save_file({name: value.clone() for name, value in policy.stored().items()}, aside)
        aside.replace(kept)
    install(policy, load_file(kept))
    return policy


@torch.no_grad()
def install(policy: PolicyModel, weights: dict[str, Tensor]) -> None:
    for name, target in policy.stored().items():
        target.copy_(weights[name])


def _talks(task: Task, seed: int, step: int) -> list[GoldTalk]:
    questions = task.questions(WARM_BATCH, WARM, seed, step)
    return [[(task.prompt(question), task.gold(question))] for question in questions]
