"""Tiny random models as a run would deliver them: a directory with config.json, and snapshots of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

from echo2.types import Policy

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "tied-llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "windowed": lambda: Qwen3Config(
        **SMALL, head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "served": lambda: Qwen3Config(  # sizes that kernels of real servers take
        **{**SMALL, "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=32,
        tie_word_embeddings=True,
    ),
    "capped": lambda: Gemma2Config(**SMALL, head_dim=8, attn_logit_softcapping=5.0, sliding_window=6),
    "convolutional": lambda: Lfm2Config(
        **SMALL, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    ),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


class TinyModel:
    """A reference model, the directory an engine is built from, and snapshots of its weights."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        config = CONFIGS[kind]()
        config.save_pretrained(folder)
        self.model = self.fresh(0)

    def fresh(self, seed: int) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                AutoConfig.from_pretrained(self.folder)
            )
        for parameter in made.parameters():
            # Wide enough that replies vary and a wrong cache shows.
            parameter.data.mul_(4.0)
        return made.eval()  # type: ignore[no-any-return]

    def snapshot(
        self, model: PreTrainedModel, policy: Policy, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> Path:
        """Write a folder as a worker has it after a verified fetch. changes: tensors to replace, None to leave out."""
        folder = self.folder / f"snapshot-{policy}"
        folder.mkdir(exist_ok=True)
        stored: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        owner: dict[int, str] = {}
        for name, tensor in sorted(model.state_dict().items()):
            first = owner.setdefault(tensor.data_ptr(), name)
            if first == name:
                stored[name] = tensor.to(dtype).contiguous()
            else:
                aliases[name] = first
        for name, tensor in changes.items():
            stored.pop(name, None)
            if tensor is not None:
                stored[name] = tensor
        save_file(stored, folder / "model.safetensors")
        described = {"policy": policy, "dtype": str(dtype).removeprefix("torch."), "aliases": aliases, "kind": "anchor"}
        (folder / "manifest.json").write_bytes(msgspec.json.encode(described))
        return folder


def reference_logprobs(model: Any, prompt: Sequence[int], reply: Sequence[int], temperature: float) -> torch.Tensor:
    """[L] log-probs of the reply's tokens from one fresh forward pass."""
    token_ids = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        logits = model(input_ids=token_ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(reply)[:, None])[:, 0]
