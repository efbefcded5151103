"""A model's weights as named bytes.

Invariant: every stored tensor appears once, under the first of its names; tied names point to it (field report E01).
The same weights give the same bytes, and so the same hash, on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import torch
from blake3 import blake3
from torch import Tensor, nn

from echo2.errors import UserError

_TORCH_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HostTensor(NamedTuple):
    """A tensor as little-endian, row-major bytes in host memory."""

    dtype: str
    """safetensors name"""
    shape: tuple[int, ...]
    data: memoryview
    """[nbytes] format ``B``"""


class SnapshotTensor(NamedTuple):
    """What a snapshot holds of a tensor, made when it is asked for."""

    dtype: str
    """safetensors name"""
    shape: tuple[int, ...]
    read: Callable[[], memoryview]
    """[nbytes] format ``B``"""


class Kind(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Tensors:
    """Whole tensors, read one at a time: reading one may bring its parts from other ranks."""

    kinds: Mapping[str, Kind]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(
            {name: Kind(value.dtype, tuple(value.shape)) for name, value in tensors.items()}, tensors.__getitem__
        )


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


def as_snapshot(tensors: Tensors, dtype: str) -> dict[str, SnapshotTensor]:
    """Floating tensors cast to ``dtype`` (round to nearest even), others as they are; one at a time.

    Reading one raises UserError where a weight is beyond what ``dtype`` can hold.
    """
    made = {}
    for name, kind in tensors.kinds.items():
        cast = _TORCH_TYPES[dtype] if kind.dtype.is_floating_point else kind.dtype
        made[name] = SnapshotTensor(safetensors_name(cast), kind.shape, partial(_read_as, tensors, name, cast))
    return made


def _read_as(tensors: Tensors, name: str, dtype: torch.dtype) -> memoryview:
    exact = tensors.read(name)
    rounded = exact.to(dtype)
    if dtype.is_floating_point and bool(torch.isinf(rounded).any()) and not bool(torch.isinf(exact).any()):
        told = str(dtype).removeprefix("torch.")
        raise UserError(
            f"weights must be at most {torch.finfo(dtype).max:.3g} for model.snapshot_dtype {told}, and {name} holds"
            " larger ones: set model.snapshot_dtype to float32"
        )
    return host_tensor(rounded).data


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


def weights_hash(tensors: Tensors) -> str:
    """blake3 over names, types, shapes and bytes in order of name."""
    digest = blake3(max_threads=blake3.AUTO)
    for name in sorted(tensors.kinds):
        tensor = host_tensor(tensors.read(name))
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def _raw(plain: Tensor) -> memoryview:
    # numpy has no bfloat16, so the bytes are viewed as uint8; a 0-d tensor is given an axis first.
    return plain.reshape(-1).view(torch.uint8).numpy().data
