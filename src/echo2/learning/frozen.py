"""The state of one step, held still while the learner trains on.

Invariant: copies lie in host memory that is used again once nobody holds the copy: fresh pages cost more than the copy.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echo2.learning.accounting import settle
from echo2.learning.checkpoint import LearnerState
from echo2.learning.gathering import whole_shapes
from echo2.learning.policy_model import own_rows

LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class FrozenState:
    """Implements ``ports.Frozen``. Where several ranks train, each holds its own rows."""

    state: LearnerState
    weights: dict[str, Tensor]
    aliases: dict[str, str]
    optimizer: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    """Whole ones of the tensors that are split over ranks"""

    @property
    def step(self) -> int:
        return self.state.step


@dataclass
class Freezer:
    """Copies tensors into host buffers and takes the buffers back when a copy is gone."""

    _spare: list[dict[str, Tensor]] = field(default_factory=list)

    def freeze(
        self,
        state: LearnerState,
        weights: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        optimizer: Mapping[str, Tensor],
    ) -> FrozenState:
        buffers = self._spare.pop() if self._spare else {}
        kept = {name: _copy(buffers.pop(f"weights/{name}", None), tensor) for name, tensor in weights.items()}
        moments = {name: _copy(buffers.pop(f"optimizer/{name}", None), tensor) for name, tensor in optimizer.items()}
        for device in {tensor.device for tensor in (*weights.values(), *optimizer.values())}:
            settle(device)
        frozen = FrozenState(state, kept, dict(aliases), moments, whole_shapes({**weights, **optimizer}))
        returned = {f"weights/{k}": v for k, v in kept.items()} | {f"optimizer/{k}": v for k, v in moments.items()}
        weakref.finalize(frozen, self._take_back, returned)
        return frozen

    def _take_back(self, buffers: dict[str, Tensor]) -> None:
        if not self._spare:
            self._spare.append(buffers)


def _copy(buffer: Tensor | None, held: Tensor) -> Tensor:
    """Into host memory; of a GPU's tensor it is only begun."""
    source = own_rows(held).detach()
    if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
        buffer = _host_memory(source)
    return buffer.copy_(source, non_blocking=source.is_cuda)


def _host_memory(source: Tensor) -> Tensor:
    """Pinned where a GPU copies into it, which is several times as fast; pageable where no more can be pinned."""
    if source.is_cuda:
        try:
            return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        except RuntimeError:
            LOG.debug("no more memory can be pinned for copies of the weights")
    return torch.empty(source.shape, dtype=source.dtype, device="cpu")
