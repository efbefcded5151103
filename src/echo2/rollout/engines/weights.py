"""Snapshot weights into a model that is already there.

Invariant: a snapshot fits a model exactly (names, shapes, element type) or not at all; that is decided before the first
weight is overwritten, so a snapshot that does not fit leaves the old policy whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echo2.errors import EngineError
from echo2.types import Policy

OBJECT_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Description(msgspec.Struct, frozen=True):
    """The part of a manifest that decides how tensors become weights; the rest was verified before."""

    policy: Policy
    dtype: str
    aliases: dict[str, str]


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """What the engine computes in: the snapshots' element type where the processor has arithmetic for it.

    A CPU without bfloat16 (or float16) instructions emulates it at half the speed of float32, which holds the same
    values; there the weights are widened.
    """
    if dtype not in DTYPES:
        raise EngineError(f"snapshots must be of {', '.join(DTYPES)}, got {dtype!r}")
    if device.type != "cpu":
        return DTYPES[dtype]
    features = torch.cpu.get_capabilities()
    native = {
        "bfloat16": features.get("avx512_bf16") or features.get("amx_bf16") or features.get("bf16"),
        "float16": features.get("avx512_fp16") or features.get("amx_fp16"),
    }
    return DTYPES[dtype] if native.get(dtype) else torch.float32


def read_weights(folder: Path, policy: Policy, targets: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The tensor for every entry of ``targets`` (a model's state), tied ones resolved.

    dtype: element type the run's snapshots must have (field report E12).
    Raises EngineError naming the first thing that does not fit.
    """
    try:
        described = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=_Description)
        stored = load_file(folder / OBJECT_NAME)
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise EngineError(f"snapshot {policy} must hold {OBJECT_NAME} and {MANIFEST_NAME}: {error}") from error
    if described.policy != policy:
        raise EngineError(f"snapshot {policy} was asked for, the folder holds {described.policy}")
    if described.dtype != dtype:
        raise EngineError(f"snapshot {policy} must hold {dtype}, it holds {described.dtype}")
    named = dict(stored)
    for alias, name in described.aliases.items():
        if name not in stored:
            raise EngineError(f"snapshot {policy} ties {alias} to {name}, which it does not hold")
        named[alias] = stored[name]
    _check_fit(named, policy, targets, DTYPES[dtype])
    return {name: named[name] for name in targets}


def _check_fit(named: Mapping[str, Tensor], policy: Policy, targets: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    missing = sorted(targets.keys() - named.keys())
    foreign = sorted(named.keys() - targets.keys())
    if missing or foreign:
        raise EngineError(
            f"snapshot {policy} must hold the model's tensors: {len(missing)} missing {missing[:3]}, "
            f"{len(foreign)} unknown {foreign[:3]}"
        )
    shared: dict[int, str] = {}
    for name, target in targets.items():
        tensor = named[name]
        if tensor.shape != target.shape:
            raise EngineError(
                f"snapshot {policy}: {name} must have shape {tuple(target.shape)}, it has {tuple(tensor.shape)}"
            )
        if tensor.is_floating_point() and tensor.dtype != dtype:
            raise EngineError(f"snapshot {policy}: {name} must be {dtype}, it is {tensor.dtype}")
        twin = shared.setdefault(target.data_ptr(), name)
        if named[twin] is not tensor and not torch.equal(named[twin], tensor):
            raise EngineError(f"snapshot {policy}: the model ties {name} to {twin}, the snapshot holds two values")


def install_weights(targets: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Overwrite the model's tensors in place; bfloat16 and float16 widen to float32 without rounding."""
    for name, target in targets.items():
        target.copy_(weights[name])
