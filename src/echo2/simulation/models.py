"""What is modelled of a world, and a modelled learner: time passes, digests chain, nothing is computed.

Invariant: the learner's "weights" are the hash chain of the batches it trained on, so a replay after a crash that saw
other rows, or other order, ends in other weights and is caught by comparing one string.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest
from echo2.ports import Frozen
from echo2.simulation.clock import Skew
from echo2.simulation.engines import EngineModel
from echo2.simulation.fates import FateModel
from echo2.simulation.links import LinkModel
from echo2.simulation.memory import MemoryDisk
from echo2.simulation.snapshots import modelled_snapshot, read_manifest
from echo2.transport.messages import BatchReply, RowAudit
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME, folder_name
from echo2.types import Policy

FOLDER = Path("learner")


class LearnerModel(msgspec.Struct, frozen=True):
    train_s: float = 10.0
    """Median time of a training step."""
    spread: float = 0.1
    """Log-normal sigma of that time."""
    checkpoint_s: float = 1.0
    snapshot_s: float = 0.5
    snapshot_bytes: float = 100e6


class WorkerModel(msgspec.Struct, frozen=True):
    name: str
    link: LinkModel = LinkModel()
    group_s: float = 5.0
    """Median time to generate a group."""
    spread: float = 0.2
    """Log-normal sigma of that time."""
    decode_s: float = 0.0
    """From an object that came to weights on its disk, while it generates."""
    activation_s: float = 0.5
    """To switch to a loaded snapshot."""
    clock_skew_s: Skew = 0.0
    """How wrong the machine's wall clock is (field report H12)."""
    usd_per_h: float | None = None
    """Price of one that joins by itself; None for what the configuration says."""
    engine: EngineModel | None = None
    """What a group's time is worked out from; None: it is drawn around ``group_s``."""
    fate: FateModel = FateModel()

    @property
    def is_undisturbed(self) -> bool:
        """It is there from the start to the end, at one speed."""
        return self.fate == FateModel()


class WorldModel(msgspec.Struct, frozen=True):
    learner: LearnerModel = LearnerModel()
    learner_link: LinkModel = LinkModel(latency_s=0.001, bytes_per_s=1.25e9)
    uplink_bytes_per_s: float = 125e6
    """The coordinator's egress, shared by all downloads."""
    delta_bytes: float = 2e6
    """Size of every delta; 0 for none, so that each publish is a whole snapshot (``learner.snapshot_bytes``)."""
    relays: Literal["none", "planned", "nodes"] = "none"
    """How objects reach workers. `none`: each from the coordinator itself; `planned`: along the production plan, as
    fluid streams; `nodes`: by the production relays' own state machines, for a few dozen workers."""
    pieces: Annotated[int, msgspec.Meta(ge=1, le=32)] = 32
    """Of an object in a fluid stream; fewer are faster to simulate."""
    pauses: bool = False
    """Engines stand still while a snapshot is on its way to them."""
    commit_s: float = 0.002
    plays_heartbeats: bool = False
    """Play every heartbeat and every poll for news. Otherwise those that would change nothing cost nothing
    (``attendance``); what happens is the same, but for the moments in which outages are noticed."""
    home_skew_s: Skew = 0.0
    """How wrong the wall clock of coordinator and learner is."""


class LearnerDisk(msgspec.Struct):
    """What survives the death of the learner's process."""

    step: int = 0
    digest: str = ""
    weights: str = "initial"


class FrozenModel(msgspec.Struct, frozen=True):
    step: int
    digest: str
    weights: str


class ModelledLearner:
    """``ports.Learner`` in virtual time; starts from what its disk holds."""

    def __init__(
        self,
        model: LearnerModel,
        run_id: str,
        dtype: str,
        durable: LearnerDisk,
        disk: MemoryDisk,
        random: Random,
        slowness: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """slowness: how many times as long as modelled a step takes at present."""
        self._model = model
        self._run_id = run_id
        self._dtype = dtype
        self._durable = durable
        self._disk = disk
        self._random = random
        self._slowness = slowness
        self._step = durable.step
        self._digest = durable.digest
        self.weights = durable.weights

    @property
    def step(self) -> int:
        return self._step

    @property
    def last_batch_digest(self) -> str:
        return self._digest

    async def audit(self, batch: BatchReply) -> tuple[RowAudit, ...]:
        return ()  # nobody here computes log-probs

    async def train_step(self, batch: BatchReply) -> Mapping[str, float]:
        assert batch.step == self._step, f"batch {batch.step} given to weights of step {self._step}"
        await asyncio.sleep(
            self._slowness() * self._model.train_s * self._random.lognormvariate(0.0, self._model.spread)
        )
        self._step += 1
        self._digest = batch.digest
        self.weights = blake3(f"{self.weights}/{batch.digest}".encode()).hexdigest()
        return {"loss": 0.0, "trainable_tokens": float(len(batch.rows))}

    async def freeze(self) -> FrozenModel:
        return FrozenModel(self._step, self._digest, self.weights)

    async def save_checkpoint(self, frozen: Frozen | None = None) -> None:
        kept = await self._held(frozen)
        await asyncio.sleep(self._model.checkpoint_s)
        self._durable.step, self._durable.digest, self._durable.weights = kept.step, kept.digest, kept.weights

    async def write_snapshot(self, incarnation: int, frozen: Frozen | None = None) -> tuple[Manifest, Path]:
        kept = await self._held(frozen)
        policy = Policy(incarnation, kept.step)
        await asyncio.sleep(self._model.snapshot_s)
        size = self._model.snapshot_bytes
        manifest, data = modelled_snapshot(self._run_id, policy, self._dtype, kept.weights, size)
        folder = FOLDER / folder_name(policy)
        self._disk.write(folder / OBJECT_NAME, data)
        self._disk.write(folder / MANIFEST_NAME, encode_manifest(manifest))
        return manifest, folder

    async def _held(self, frozen: Frozen | None) -> FrozenModel:
        if frozen is None:
            return await self.freeze()
        assert isinstance(frozen, FrozenModel), "frozen by another learner"
        return frozen

    async def discard_snapshots(self, keep: int) -> None:
        found = self._disk.folders(MANIFEST_NAME, FOLDER)
        found.sort(key=lambda folder: read_manifest(self._disk, folder).policy)
        for folder in found[: max(0, len(found) - keep)]:
            self._disk.remove(folder)
