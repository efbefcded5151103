"""A learner whose weights an engine in the same process generates with.

Invariant: whatever changes weights, or puts others in their place (a step, an audit), has borrowed them first, and they
go back to the engine only under the name that the coordinator knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2.broadcast.manifest import Manifest
from echo2.ports import Frozen
from echo2.transport.messages import BatchReply, RowAudit

if TYPE_CHECKING:
    from echo2.learning.learner import TorchLearner
    from echo2.rollout.engines.shared import SharedEngine


def shared_engine(learner: TorchLearner, model_dir: Path, threads: int) -> SharedEngine:
    """An engine on the learner's weights and device. Blocking."""
    from echo2.rollout.engines.shared import SharedEngine

    policy = learner.policy
    weights: Mapping[str, Any] = policy.model.state_dict()
    return SharedEngine(model_dir, weights, computes_in=policy.compute_dtype, threads=threads)


class SharingLearner:
    """Implements ``ports.Learner``. To freeze a step only reads, so the engine need not wait for a publish."""

    def __init__(self, own: TorchLearner, engine: SharedEngine) -> None:
        self._own = own
        self._engine = engine

    @property
    def step(self) -> int:
        return self._own.step

    @property
    def last_batch_digest(self) -> str:
        return self._own.last_batch_digest

    @property
    def initial_weights_hash(self) -> str:
        return self._own.initial_weights_hash

    async def audit(self, batch: BatchReply) -> tuple[RowAudit, ...]:
        await self._engine.lend()
        return await self._own.audit(batch)

    async def train_step(self, batch: BatchReply) -> Mapping[str, float]:
        await self._engine.lend()
        return await self._own.train_step(batch)

    async def freeze(self) -> Frozen:
        return await self._own.freeze()

    async def save_checkpoint(self, frozen: Frozen | None = None) -> None:
        await self._own.save_checkpoint(frozen)

    async def write_snapshot(self, incarnation: int, frozen: Frozen | None = None) -> tuple[Manifest, Path]:
        return await self._own.write_snapshot(incarnation, frozen)

    async def discard_snapshots(self, keep: int) -> None:
        await self._own.discard_snapshots(keep)
