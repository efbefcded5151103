"""Ranks that are processes, over torch.distributed.

Invariant: one thread speaks over one group at a time, and each group is for one purpose (``Group``): steps and
publishes run beside each other and must not take each other's messages. A rank that is gone, or silent for the
time-out, makes the others' calls raise; none waits for ever.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echo2.errors import ConfigError, Starved
from echo2.learning.policy_model import pick_device
from echo2.learning.ranks import rows_of


class GlooRanks:
    """Implements ``ranks.Ranks`` over a group of its own, through host memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.here = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world)))
        self.local = int(os.environ.get("LOCAL_RANK", str(self.rank)))

    def gather(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        most = max(int(size) for size in sizes)
        if most == 0:
            return [b""] * self.world
        own = torch.zeros(most, dtype=torch.uint8)
        own[: len(data)] = _as_tensor(data)
        parts = [torch.empty(most, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(parts, own, group=self.group)
        return [_as_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self.group)
        if int(size) == 0:
            return b""
        content = _as_tensor(data) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self.group)
        return data if self.rank == 0 else _as_bytes(content)

    def collect(self, own: Tensor, shape: Sequence[int]) -> Tensor:
        if self.rank:
            if own.numel():
                dist.send(own.contiguous(), dst=0, group=self.group)
            return own
        whole = own.new_empty(tuple(shape))
        whole[: len(own)] = own
        for rank in range(1, self.world):
            first, end = rows_of(rank, self.world, shape[0])
            if whole[first:end].numel():
                dist.recv(whole[first:end], src=rank, group=self.group)
        return whole


@dataclass(frozen=True)
class Group:
    """What the ranks of one learner share."""

    steps: GlooRanks
    """For commands to the step loop and for what is said inside steps."""
    publishing: GlooRanks
    """For commands to the publish loop, checkpoints and snapshots."""
    device: torch.device
    """Of this rank."""
    mesh: DeviceMesh
    """Over which weights are split."""
    host_mesh: DeviceMesh
    """The same for copies in host memory."""


def join_group(device_name: str, timeout_s: float) -> Group:
    """Meet the other ranks, as the launcher's environment says. Raises Starved when they do not come."""
    device = pick_device(device_name)
    if device.type == "cuda":
        device = own_gpu(device)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
        world = dist.get_world_size()
        host_mesh = init_device_mesh("cpu", (world,))
        mesh = host_mesh if device.type == "cpu" else init_device_mesh(device.type, (world,))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise Starved(
            f"the ranks of this learner must meet within {timeout_s:.0f} s, but: {first_line(error)}"
        ) from error
    return Group(GlooRanks(groups[0]), GlooRanks(groups[1]), device, mesh, host_mesh)


def leave_group() -> None:
    """In order, when every rank leaves."""
    if dist.is_initialized():
        dist.destroy_process_group()


def lost_peer(error: BaseException) -> bool:
    """Whether another rank is gone or silent; torch has no type of its own for all of it."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in words or "nccl" in words)
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def own_gpu(device: torch.device) -> torch.device:
    """The GPU of this rank among those of its machine. Raises ConfigError where there is none."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device.index not in (None, 0):
        raise ConfigError(f"learning.device must be auto, cpu or cuda where several ranks train, got {device}")
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"each rank must have a GPU of its own: this machine has {torch.cuda.device_count()} and rank {local} of it"
            " has none; start fewer ranks, or set learning.device to cpu"
        )
    return torch.device("cuda", local)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(content: Tensor) -> bytes:
    return content.numpy().tobytes()
