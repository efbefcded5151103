"""A policy whose weights, gradients and optimizer are split over the ranks (FSDP2).

Invariant: between two passes each rank holds its own rows of every weight and nothing else. A pass makes the weights of
one block whole, uses them and lets them go. Gradients are summed over the ranks, never averaged: the loss is already
divided by the tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from echo2.learning.guarded import Guards
from echo2.learning.packing import MicroBatch
from echo2.learning.policy_model import PolicyModel, blocks_of


class _Whole(nn.Module):
    """The outermost module of a pass: log-probs are computed inside, where the output embedding is whole too."""

    def __init__(self, policy: PolicyModel, compute: Callable[[MicroBatch], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.model = policy.model
        self._compute = compute

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return self._compute(micro)


def shard(policy: PolicyModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Split a policy that every rank loaded whole; each keeps its rows, on ``device``."""
    if device.type == "cpu":
        _ = policy.kept_bytes_per_token  # measured while a pass needs nobody else
    weights = next(policy.model.parameters()).dtype
    half = policy.compute_dtype if policy.compute_dtype != weights else None
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=weights)
    guards = Guards(policy.watch, device)
    for block in blocks_of(policy.model):
        guards.around(block)
        fully_shard(block, mesh=mesh, mp_policy=precision)
    whole = _Whole(policy, guards.whole(policy.hidden, policy.read_off, policy.head))
    # A micro-batch is handed through as it is: its log-probs are numbers, not activations.
    outer = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=weights, cast_forward_inputs=False)
    root = fully_shard(whole, mesh=mesh, mp_policy=outer)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    policy.model.to(device)  # buffers; the weights are there already

    def logprobs(micro: MicroBatch) -> tuple[Tensor, Tensor]:
        found = cast("tuple[Tensor, Tensor]", whole(micro))
        if not torch.is_grad_enabled():
            # Only a backward pass lets the outermost weights go; whole ones would outlive the next update.
            root.reshard()
        return found

    policy.split(logprobs, device, root.reshard)


def like(own: Tensor, shape: tuple[int, ...], mesh: DeviceMesh) -> Any:
    """This rank's rows as a part of the tensor of ``shape``; no rank is asked."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
