"""Model FLOPs of a training step, and which share of what the device can do they are.

Invariant: only operations that the model's definition needs are counted (PaLM, arXiv 2204.02311, appendix B): a
backward pass is two forward ones, and whatever is computed a second time or at padding does not count, so no detour
looks like work. A prompt that a group shares is computed once and counts once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echo2.learning.packing import MicroBatch

DENSE_BF16_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
    "RTX 5090": 209e12, "RTX 4090": 165e12, "A10G": 70e12, "A10": 125e12, "L4": 121e12, "RTX 3090": 71e12,
}  # fmt: skip
"""Operations per second by part of the device's name, from the makers' data sheets, without sparsity."""
PROBE_SIZE = 1024
"""Rows and columns of the matrices whose product tells what a device of another name can do."""


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one forward pass: two for each multiply-add of a matrix product."""

    per_token: float
    """Of all layers' matrices, embeddings apart."""
    per_pair: float
    """Of attention, for each pair of a token and one that it sees, over all layers."""
    per_target: float
    """Of the output embedding."""

    def forward(self, micros: Sequence[MicroBatch]) -> float:
        return sum(
            self.per_token * int(micro.real.sum()) + self.per_pair * _pairs(micro) + self.per_target * micro.targets
            for micro in micros
        )


def model_flops(model: Any) -> ModelFlops:
    """Of a dense decoder. model: a Hugging Face causal LM."""
    text = model.config.get_text_config()
    heads, layers = getattr(text, "num_attention_heads", 0), getattr(text, "num_hidden_layers", 0)
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(1, heads))
    head = model.get_output_embeddings().weight
    embeddings = {id(model.get_input_embeddings().weight), id(head)}
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings)
    return ModelFlops(2.0 * matrices, 4.0 * width * layers, 2.0 * head.numel())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of matrix products: the data sheet's for a known GPU in bfloat16, else measured once."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, flops in DENSE_BF16_FLOPS.items():
            if part in name:
                return flops
    return _measured(device, dtype)


@torch.no_grad()
def _measured(device: torch.device, dtype: torch.dtype) -> float:
    a = torch.full((PROBE_SIZE, PROBE_SIZE), 0.5, dtype=dtype, device=device)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    seconds = []
    for _ in range(5):
        settle(device)
        began_s = time.perf_counter()
        torch.mm(a, a, out=out)
        settle(device)
        seconds.append(time.perf_counter() - began_s)
    return 2.0 * PROBE_SIZE**3 / max(min(seconds), 1e-9)


def settle(device: torch.device) -> None:
    """Wait for what the device was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pairs(micro: MicroBatch) -> float:
    """Of real tokens; a token sees itself."""
    if micro.visible is None:
        lengths = micro.real.sum(dim=1).double()
        return float((lengths * (lengths + 1) / 2).sum())
    return float((micro.visible[:, 0].sum(dim=-1) * micro.real).sum())
