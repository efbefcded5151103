"""Hand-made trajectories, batches and tiny models for the learning plane's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from echo2.config.root import Config
from echo2.learning.policy_model import PolicyModel
from echo2.transport.messages import BatchReply, BatchRow
from echo2.types import (
    LOGPROBS_FULL_VOCAB_AT_TEMPERATURE,
    FinishReason,
    Policy,
    Segment,
    Trajectory,
    pack_logprobs,
    pack_tokens,
)

VOCABULARY = 32


def trajectory(
    prompt: Sequence[int],
    reply: Sequence[int],
    reward: float = 0.0,
    *,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    **fields: Any,
) -> Trajectory:
    """One turn; without ``logprobs`` the engine reported none."""
    convention = None if logprobs is None else LOGPROBS_FULL_VOCAB_AT_TEMPERATURE
    packed = None if logprobs is None else pack_logprobs(logprobs)
    defaults: dict[str, Any] = {
        "task": "sums",
        "prompt_id": "p",
        "segments": (Segment(pack_tokens(prompt), False), Segment(pack_tokens(reply), True, packed)),
        "policy_min": Policy(0, version),
        "policy_max": Policy(0, version),
        "finish_reason": FinishReason.STOP,
        "logprob_convention": convention,
    }
    return Trajectory(reward=reward, **(defaults | fields))


def batch_of(groups: Mapping[int, Sequence[Trajectory]], step: int = 0) -> BatchReply:
    rows = tuple(
        BatchRow(group, index, msgspec.Raw(msgspec.msgpack.encode(record)))
        for group, records in groups.items()
        for index, record in enumerate(records)
    )
    return BatchReply(step, f"digest-{step}", rows)


def some_batch(step: int = 0, groups: int = 4, *, version: int | None = None) -> BatchReply:
    """Groups of three replies of different lengths with different rewards; the same for the same step.

    version: that sampled them, the step's own by default.
    """
    made = {}
    for group in range(groups):
        prompt = [(step + group + i) % VOCABULARY for i in range(3 + group % 2)]
        made[group] = [
            trajectory(
                prompt,
                [(group + 5 * i + j) % VOCABULARY for j in range(2 + i)],
                reward=float(i == group % 3),
                logprobs=[-3.0 - 0.1 * j for j in range(2 + i)],
                version=step if version is None else version,
            )
            for i in range(3)
        ]
    return batch_of(made, step)


def tiny_qwen3(*, tied: bool = True, seed: int = 0) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return _seeded(Qwen3ForCausalLM, config, seed)


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Learned absolute positions; dropout in its configuration."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _seeded(GPT2LMHeadModel, config, seed)


def policy_of(model: Any, *, chunk: int = 1024) -> PolicyModel:
    return PolicyModel(model, compute_dtype="float32", logits_chunk_tokens=chunk)


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def learning_config(model_dir: Path, **learning: Any) -> Config:
    settings = {"lr": 1e-2, "device": "cpu"} | learning
    return Config.model_validate({"model": {"path": str(model_dir)}, "learning": settings})


def _seeded(architecture: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return architecture(config)
