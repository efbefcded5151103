"""The learner on PyTorch: batches in, versions out.

Invariant: weights and optimizer are float32 and change only inside ``train_step``; the step counter moves with them.
What is saved or published is a copy that was frozen between two steps, so both can run beside the next one. A resumed
learner continues with the same bits as one that was never interrupted, on the same machine with as many threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.config.root import Config
from echo2.errors import UserError
from echo2.learning import checkpoint
from echo2.learning.audit import Auditor
from echo2.learning.batch import TrainingBatch, batch_rules, form_training_batch
from echo2.learning.frozen import Freezer, FrozenState
from echo2.learning.objectives import configured
from echo2.learning.opening import (
    CHECKPOINT_FOLDER,
    config_digest,
    install,
    make_version_0,
    policy_model,
    reference_model,
    set_threads,
)
from echo2.learning.optimizer import build_optimizer, load_optimizer, optimizer_tensors
from echo2.learning.policy_model import PolicyModel, pick_device
from echo2.learning.pretrained import resolve_model
from echo2.learning.update import UpdateSettings, run_updates
from echo2.learning.warm_start import GoldBatches
from echo2.learning.weights import as_snapshot, stored_tensors
from echo2.ports import Frozen
from echo2.transport.messages import BatchReply, RowAudit
from echo2.transport.partial import discard_older
from echo2.types import Policy

if TYPE_CHECKING:
    from echo2.ports import Manifest, SnapshotWriter

LOG = logging.getLogger(__name__)

SNAPSHOT_FOLDERS = Path("learner") / "snapshots"
"""Inside the run folder."""


class TorchLearner:
    """Implements ``ports.Learner``."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        run_id: str,
        policy: PolicyModel,
        state: checkpoint.LearnerState,
        write_snapshot: SnapshotWriter,
        reference: PolicyModel | None = None,
    ) -> None:
        """policy: holds the weights of ``state.step``.  reference: version 0, needed when ``kl_beta`` is above 0."""
        learning = config.learning
        if (reference is not None) != (learning.kl_beta > 0):
            raise ValueError(f"a reference model is for kl_beta above 0, it is {learning.kl_beta}")
        self._config = config
        self._run_id = run_id
        self._checkpoints = run_dir / CHECKPOINT_FOLDER
        self._snapshots = run_dir / SNAPSHOT_FOLDERS
        self._policy = policy
        self._reference = reference
        self._state = state
        self._writer = write_snapshot
        self._optimizer = build_optimizer(policy.parameters(), learning)
        self._freezer = Freezer()
        self._durable: set[int] = set()
        self._training = False
        self._rules = batch_rules(learning, policy.vocabulary)
        self._auditor = Auditor(policy, self._snapshots, config.audited_rows, self._rules)
        self._settings = UpdateSettings(
            *configured(config),
            learning.updates_per_step,
            learning.micro_batch_tokens,
            learning.grad_clip,
        )

    @classmethod
    def open(
        cls,
        config: Config,
        run_dir: Path,
        run_id: str,
        *,
        resume: bool,
        write_snapshot: SnapshotWriter,
        gold: GoldBatches | None = None,
        model_dir: Path | None = None,
    ) -> TorchLearner:
        """Load the newest whole checkpoint of the run, or begin at step 0 with the warm start. Blocking.

        gold: pairs of the warm start, needed when ``model.warm_start_steps`` is above 0 and there is no checkpoint.
        model_dir: what ``resolve_model`` returned, where the caller has it already.
        Raises UserError, ConfigError; IntegrityError when what is on disk is not of this run's model.
        """
        set_threads(config)
        folder = model_dir or resolve_model(config.model, run_dir, seed=config.run.seed)
        steps = checkpoint.complete_steps(run_dir / CHECKPOINT_FOLDER)
        if steps and not resume:
            raise UserError(
                f"{run_dir} must be new or resumed, it holds a checkpoint of step {steps[-1]}: pass --resume"
            )
        device = pick_device(config.learning.device)
        policy = policy_model(config, folder, device)
        if steps:
            learner = cls._resumed(config, run_dir, run_id, policy, folder, steps[-1], write_snapshot)
        else:
            initial = make_version_0(config, run_dir, policy, gold)
            state = checkpoint.LearnerState(0, "", initial, config_digest(config), run_id)
            reference = reference_model(config, run_dir, folder, device, initial)
            learner = cls(config, run_dir, run_id, policy, state, write_snapshot, reference)
        return learner

    @classmethod
    def _resumed(
        cls,
        config: Config,
        run_dir: Path,
        run_id: str,
        policy: PolicyModel,
        folder: Path,
        step: int,
        write_snapshot: SnapshotWriter,
    ) -> TorchLearner:
        saved = checkpoint.load(run_dir / CHECKPOINT_FOLDER, step)
        if saved.state.run_id != run_id:
            raise UserError(
                f"the checkpoints in {run_dir} must be of run {run_id}, they are of run {saved.state.run_id}"
            )
        if saved.state.config_digest != config_digest(config):
            LOG.warning("model or learning settings differ from those the checkpoint of step %d was made with", step)
        install(policy, saved.weights, f"the checkpoint of step {step}")
        reference = reference_model(config, run_dir, folder, policy.device, saved.state.initial_weights_hash)
        learner = cls(config, run_dir, run_id, policy, saved.state, write_snapshot, reference)
        load_optimizer(learner._optimizer, policy.parameters(), saved.optimizer)
        learner._durable.add(step)
        return learner

    @property
    def step(self) -> int:
        return self._state.step

    @property
    def last_batch_digest(self) -> str:
        return self._state.last_batch_digest

    @property
    def initial_weights_hash(self) -> str:
        return self._state.initial_weights_hash

    async def audit(self, batch: BatchReply) -> tuple[RowAudit, ...]:
        """Of at most ``Config.audited_rows`` rows; the weights are the same before and after."""
        self._require_rest()
        self._training = True
        try:
            return await asyncio.to_thread(self._audit, batch)
        finally:
            self._training = False

    async def train_step(self, batch: BatchReply) -> Mapping[str, float]:
        """Train on batch t at version t. A batch with no trainable token still makes version t + 1, and warns."""
        if batch.step != self.step:
            raise ValueError(f"the next batch must be {self.step}, got batch {batch.step}")
        self._training = True
        try:
            statistics = await asyncio.to_thread(self._train, batch)
            self._state = _after(self._state, batch)
        finally:
            self._training = False
        return statistics

    async def freeze(self) -> FrozenState:
        self._require_rest()
        made: list[FrozenState] = []
        # Handed over in a list: the future of a thread lives in a reference cycle, and a result kept in it would hold
        # gigabytes until the garbage collector happens to look.
        await asyncio.to_thread(lambda: made.append(self._freeze()))
        return made.pop()

    async def save_checkpoint(self, frozen: Frozen | None = None) -> None:
        """Also removes all but the newest ``checkpoint.keep``. Raises DiskFull; the previous ones are then whole."""
        held = await self._held(frozen)
        if held.step not in self._durable:
            # The thread holds the frozen copy itself, so its memory is not reused even when this wait is cancelled.
            await asyncio.to_thread(self._save, held)
            self._durable.add(held.step)
            await asyncio.to_thread(checkpoint.prune, self._checkpoints, self._config.checkpoint.keep)

    async def write_snapshot(self, incarnation: int, frozen: Frozen | None = None) -> tuple[Manifest, Path]:
        """The weights in ``model.snapshot_dtype``, as policy (incarnation, frozen step). Raises DiskFull."""
        held = await self._held(frozen)
        policy = Policy(incarnation, held.step)
        folder = self._snapshots / str(policy)
        dtype = self._config.model.snapshot_dtype

        def write() -> Manifest:
            return self._writer(
                as_snapshot(held.weights, dtype),
                held.aliases,
                run_id=self._run_id,
                policy=policy,
                dtype=dtype,
                folder=folder,
            )

        return await asyncio.to_thread(write), folder

    async def discard_snapshots(self, keep: int) -> None:
        await asyncio.to_thread(discard_older, self._snapshots, keep)

    def _save(self, held: FrozenState) -> None:
        checkpoint.save(self._checkpoints, held.state, held.weights, held.optimizer)

    async def _held(self, frozen: Frozen | None) -> FrozenState:
        if frozen is None:
            return await self.freeze()
        if not isinstance(frozen, FrozenState):
            raise TypeError(f"frozen must come from freeze(), got {type(frozen).__name__}")
        return frozen

    def _require_rest(self) -> None:
        if self._training:
            raise RuntimeError("weights can be frozen between two steps only: await train_step first")

    def _freeze(self) -> FrozenState:
        weights, aliases = stored_tensors(self._policy.model)
        moments = optimizer_tensors(self._optimizer, self._policy.parameters())
        return self._freezer.freeze(self._state, weights, aliases, moments)

    def _audit(self, reply: BatchReply) -> tuple[RowAudit, ...]:
        set_threads(self._config)
        return self._auditor.audit(reply)

    def _train(self, reply: BatchReply) -> dict[str, float]:
        """Runs in a thread of its own, alone."""
        set_threads(self._config)
        began_s = time.perf_counter()
        batch = form_training_batch(reply, self._rules)
        if batch.unusable_rows:
            LOG.warning("step %d: %d rows cannot be trained on and are left out", reply.step, batch.unusable_rows)
        statistics = run_updates(batch, self._policy, self._reference, self._optimizer, self._settings)
        if statistics["updates_not_finite"]:
            LOG.warning("step %d: an update's gradient was not finite and was skipped", reply.step)
        if statistics["trainable_tokens"] == 0:
            LOG.warning("step %d: no token carries loss, the weights are unchanged", reply.step)
        statistics |= _batch_statistics(batch)
        return statistics | {
            "lr": self._config.learning.lr,
            "step_s": time.perf_counter() - began_s,
        }


def _after(state: checkpoint.LearnerState, batch: BatchReply) -> checkpoint.LearnerState:
    return checkpoint.LearnerState(
        state.step + 1, batch.digest, state.initial_weights_hash, state.config_digest, state.run_id
    )


def _batch_statistics(batch: TrainingBatch) -> dict[str, float]:
    return {
        "zero_variance_groups": batch.advantages.zero_variance_keys,
        "single_row_groups": batch.advantages.single_keys,
        "unusable_rows": batch.unusable_rows,
        "overlong_rows": batch.overlong_rows,
        "dropped_rows": batch.dropped_rows,
        "aged_tokens": batch.aged_tokens,
    }
