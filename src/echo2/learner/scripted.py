"""A learner that only takes time: for rehearsing a run, with its real programs, disks and lines, before it is paid for.

Invariant: the weights are a function of the seed and the step alone, so a resumed learner publishes the same bytes as
one that was never interrupted; a checkpoint is whole or absent.

Every step moves a stated share of the weights by one unit in the last place, as steps at a small learning rate do, so
deltas have the size that they will have.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import FLOATING
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.config.root import Config
from echo2.durable import publish_folder, remove_folder, room_for, write_file
from echo2.errors import IntegrityError, UserError
from echo2.pace import Pace, Sleep, working_sleep
from echo2.ports import Frozen
from echo2.run.folder import RunFolder
from echo2.transport.messages import BatchReply, RowAudit
from echo2.transport.partial import PARTIAL, discard_older, folder_name
from echo2.types import Policy

STATE, WEIGHTS = "state.json", "weights.bin"
TENSOR = "weights"
_FOLDER = re.compile(r"step-(\d{8,})")
_BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
_SMALL = {"bfloat16": 0x3C00, "float16": 0x2000, "float32": 0x3C000000}
"""Bit patterns of about 0.008, from which weights begin: a unit in the last place is a small change there."""


class _State(msgspec.Struct, frozen=True):
    run_id: str
    step: int
    digest: str
    initial: str


class FrozenScript(msgspec.Struct, frozen=True):
    step: int
    digest: str
    weights: NDArray[np.unsignedinteger]


class ScriptedLearner:
    """Implements ``ports.Learner``."""

    def __init__(self, config: Config, folder: RunFolder, state: _State, weights: NDArray[np.unsignedinteger]) -> None:
        rehearsal = config.rehearsal
        self._pace = Pace(rehearsal.train_s, rehearsal.train_spread)
        self._changed = rehearsal.changed
        self._dtype, self._seed, self._keep = config.model.snapshot_dtype, config.run.seed, config.checkpoint.keep
        self._checkpoints, self._snapshots = folder.checkpoints, folder.learner / "snapshots"
        self._state, self._weights = state, weights
        self.sleep: Sleep = working_sleep

    @classmethod
    def open(cls, config: Config, folder: RunFolder, run_id: str) -> ScriptedLearner:
        """Its newest whole checkpoint, or the beginning. Raises UserError, IntegrityError."""
        steps = _complete_steps(folder.checkpoints)
        if not steps:
            weights = _first_weights(config)
            return cls(config, folder, _State(run_id, 0, "", blake3(weights.tobytes()).hexdigest()), weights)
        at = _folder(folder.checkpoints, steps[-1])
        try:
            state = msgspec.json.decode((at / STATE).read_bytes(), type=_State)
            weights = np.fromfile(at / WEIGHTS, _BITS[config.model.snapshot_dtype])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise IntegrityError(
                f"the checkpoint {at} must be readable, got: {error}; remove it for an older"
            ) from error
        if state.run_id != run_id:
            raise UserError(f"the checkpoints in {folder.root} must be of run {run_id}, they are of run {state.run_id}")
        return cls(config, folder, state, weights)

    @property
    def step(self) -> int:
        return self._state.step

    @property
    def last_batch_digest(self) -> str:
        return self._state.digest

    @property
    def initial_weights_hash(self) -> str:
        return self._state.initial

    async def audit(self, batch: BatchReply) -> tuple[RowAudit, ...]:
        return ()  # nobody here computes log-probs

    async def train_step(self, batch: BatchReply) -> Mapping[str, float]:
        step = self._state.step
        if batch.step != step:
            raise ValueError(f"the next batch must be {step}, got batch {batch.step}")
        await self.sleep(self._pace.draw_s(Random(f"{self._seed}/{step}")))
        random = np.random.default_rng((self._seed, step))
        count = round(self._changed * self._weights.size)
        moved = random.choice(self._weights.size, count, replace=False, shuffle=False)
        self._weights = self._weights.copy()
        self._weights[moved] += 1
        self._state = msgspec.structs.replace(self._state, step=step + 1, digest=batch.digest)
        return {"loss": 0.0, "rows": float(len(batch.rows))}

    async def freeze(self) -> FrozenScript:
        return FrozenScript(self._state.step, self._state.digest, self._weights)

    async def save_checkpoint(self, frozen: Frozen | None = None) -> None:
        held = await self._held(frozen)
        state = msgspec.structs.replace(self._state, step=held.step, digest=held.digest)
        await asyncio.to_thread(_save, self._checkpoints, state, held.weights, self._keep)

    async def write_snapshot(self, incarnation: int, frozen: Frozen | None = None) -> tuple[Manifest, Path]:
        held = await self._held(frozen)
        policy = Policy(incarnation, held.step)
        folder = self._snapshots / folder_name(policy)
        tensors = {TENSOR: RawTensor.of(held.weights, FLOATING[self._dtype])}
        manifest = await asyncio.to_thread(
            write_snapshot, tensors, {}, run_id=self._state.run_id, policy=policy, dtype=self._dtype, folder=folder
        )
        return manifest, folder

    async def discard_snapshots(self, keep: int) -> None:
        await asyncio.to_thread(discard_older, self._snapshots, keep)

    async def _held(self, frozen: Frozen | None) -> FrozenScript:
        held = await self.freeze() if frozen is None else frozen
        if not isinstance(held, FrozenScript):
            raise TypeError(f"frozen must come from freeze(), got {type(held).__name__}")
        return held


def _first_weights(config: Config) -> NDArray[np.unsignedinteger]:
    dtype = config.model.snapshot_dtype
    bits = np.dtype(_BITS[dtype])
    count = max(1, config.rehearsal.snapshot_bytes // bits.itemsize)
    # The exponent and sign vary little and the rest is noise, as in a trained matrix: so a snapshot compresses as one.
    noise = np.random.default_rng(config.run.seed).integers(0, 1 << (8 * bits.itemsize - 7), count, dtype=bits)
    return np.asarray(noise + bits.type(_SMALL[dtype]), dtype=bits)


def _complete_steps(root: Path) -> list[int]:
    found = root.iterdir() if root.is_dir() else ()
    return sorted(int(match[1]) for path in found if (match := _FOLDER.fullmatch(path.name)))


def _folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _save(root: Path, state: _State, weights: NDArray[np.unsignedinteger], keep: int) -> None:
    final = _folder(root, state.step)
    if final.exists():
        return
    partial = final.with_name(final.name + PARTIAL)
    with room_for(partial):
        partial.mkdir(parents=True, exist_ok=True)
    write_file(partial / WEIGHTS, weights.tobytes())
    write_file(partial / STATE, msgspec.json.encode(state))
    publish_folder(partial, final)
    for step in _complete_steps(root)[:-keep]:
        remove_folder(_folder(root, step))
