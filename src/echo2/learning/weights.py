"""A model's weights as named bytes.

Invariant: every stored tensor appears once, under the first of its names; tied names point to it (field report E01).
The same weights give the same bytes, and so the same hash, on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor, nn

_TORCH_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HostTensor(NamedTuple):
    """A tensor as little-endian, row-major bytes in host memory."""

    dtype: str
    """safetensors name"""
    shape: tuple[int, ...]
    data: memoryview
    """[nbytes] format ``B``"""


def stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors of the model's state by name, and the tied names: name → name of the stored tensor.

    The tensors are the model's own, not copies.
    """
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in names:
            aliases[name] = names[place]
        else:
            names[place] = name
            stored[name] = tensor
    return stored, aliases


def as_snapshot(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, HostTensor]:
    """Floating tensors cast to ``dtype`` (round to nearest even), others as they are."""
    return {
        name: host_tensor(tensor.to(_TORCH_TYPES[dtype]) if tensor.is_floating_point() else tensor)
        for name, tensor in tensors.items()
    }


def host_tensor(tensor: Tensor) -> HostTensor:
    """[…] → its bytes; a view where the tensor already lies contiguous in host memory."""
    plain = tensor.detach().to("cpu").contiguous()
    return HostTensor(safetensors_name(plain.dtype), tuple(plain.shape), _raw(plain))


def safetensors_name(dtype: torch.dtype) -> str:
    return {
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }[dtype]


def weights_hash(tensors: Mapping[str, Tensor]) -> str:
    """blake3 over names, types, shapes and bytes in order of name."""
    digest = blake3(max_threads=blake3.AUTO)
    for name in sorted(tensors):
        tensor = host_tensor(tensors[name])
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def _raw(plain: Tensor) -> memoryview:
    # numpy has no bfloat16, so the bytes are viewed as uint8; a 0-d tensor is given an axis first.
    return plain.reshape(-1).view(torch.uint8).numpy().data
