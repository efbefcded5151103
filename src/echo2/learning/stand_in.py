"""A model that computes with other weights than its own for a while.

Invariant: afterwards the model holds its own weights, bit for bit, whatever happened meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from echo2.errors import IntegrityError
from echo2.learning.opening import read_rows
from echo2.learning.policy_model import PolicyModel, own_rows
from echo2.learning.ranks import ONE_RANK, Ranks, together
from echo2.transport.partial import OBJECT_NAME


@contextmanager
def standing_in(policy: PolicyModel, snapshot: Path, ranks: Ranks = ONE_RANK) -> Iterator[None]:
    """The model computes with the snapshot's weights inside the block, and with its own after it.

    Raises IntegrityError, on all ranks, when the snapshot is another model's or cannot be read.
    """
    own: list[Callable[[], object]] = []
    swap = _swapped if ranks.world == 1 else _overwritten
    try:
        together(ranks, lambda: _put_in(swap, policy, snapshot, ranks, own))
        with policy.alone():
            yield
    finally:
        for put_back in own:
            put_back()


_Swap = Callable[[PolicyModel, Path, Ranks, list[Callable[[], object]]], None]


@torch.no_grad()
def _put_in(swap: _Swap, policy: PolicyModel, snapshot: Path, ranks: Ranks, own: list[Callable[[], object]]) -> None:
    try:
        swap(policy, snapshot, ranks, own)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{snapshot} must be readable, got: {error}") from error


def _swapped(policy: PolicyModel, snapshot: Path, _: Ranks, own: list[Callable[[], object]]) -> None:
    """One rank: the tensors change places, and the weights themselves are never written."""
    stored = load_file(snapshot / OBJECT_NAME)
    targets = dict(chain(policy.weights().items(), policy.model.named_buffers()))
    for name, parameter in policy.weights().items():
        if name not in stored or stored[name].shape != parameter.shape:
            raise _stranger(snapshot, name)
    for name in list(stored):
        if (target := targets.get(name)) is not None:
            own.append(partial(setattr, target, "data", target.data))
            target.data = stored.pop(name).to(target.device, target.dtype)


def _overwritten(policy: PolicyModel, snapshot: Path, ranks: Ranks, own: list[Callable[[], object]]) -> None:
    """Several ranks: what brings the weights together looks at their memory, so a copy is kept and brought back."""
    with safe_open(snapshot / OBJECT_NAME, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        parameters = policy.weights()
        for name, parameter in parameters.items():
            if shapes.get(name) != tuple(parameter.shape):
                raise _stranger(snapshot, name)
        for name, parameter in parameters.items():
            rows = own_rows(parameter.detach())
            own.append(partial(_copy_back, rows, rows.clone()))
            read_rows(file, name, parameter, ranks)


@torch.no_grad()
def _copy_back(rows: Tensor, kept: Tensor) -> None:
    rows.copy_(kept)


def _stranger(snapshot: Path, name: str) -> IntegrityError:
    return IntegrityError(f"{snapshot} must hold this model's tensors; {name} is missing or has another shape")
