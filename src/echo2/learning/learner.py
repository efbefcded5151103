"""The learner on PyTorch: batches in, versions out.

Invariant: weights and optimizer change only inside ``train_step``; the step counter moves with them. What is saved or
published is a copy that was frozen between two steps, so both can run beside the next one. A resumed learner continues
with the same bits as one that was never interrupted, on the same machine with as many threads and ranks.

Several ranks hold such a learner each, with their rows of the weights; all of them call the same methods in the same
order, steps and publishes each in an order of their own (``learner/leader.py`` sees to that).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from echo2.config.root import Config
from echo2.errors import UserError
from echo2.learning import checkpoint
from echo2.learning.adapted import first_policy, reference_of, resumed_policy
from echo2.learning.audit import Auditor
from echo2.learning.batch import batch_rules, form_training_batch
from echo2.learning.frozen import Freezer, FrozenState
from echo2.learning.gathering import gathered, serve
from echo2.learning.objectives import configured
from echo2.learning.opening import CHECKPOINT_FOLDER, config_digest, model_digest, require_same_model, set_threads
from echo2.learning.optimizer import build_optimizer, optimizer_tensors
from echo2.learning.policy_model import PolicyModel, Scores, pick_device
from echo2.learning.pretrained import resolve_model
from echo2.learning.ranks import ONE_RANK, Ranks, together
from echo2.learning.resuming import keep, restore
from echo2.learning.shortage import Budget, out_of_memory
from echo2.learning.soundness import require_finite
from echo2.learning.update import UpdateSettings, run_updates
from echo2.learning.warm_start import GoldBatches
from echo2.learning.weights import as_snapshot
from echo2.ports import Frozen
from echo2.transport.messages import BatchReply, RowAudit
from echo2.transport.partial import discard_older
from echo2.types import Policy

if TYPE_CHECKING:
    from echo2.learning.torch_ranks import Group
    from echo2.ports import BaseKeeper, Manifest, SnapshotWriter

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
        reference: Scores | None = None,
        group: Group | None = None,
    ) -> None:
        """policy: holds the weights of ``state.step``.  reference: version 0, needed when ``kl_beta`` is above 0.
        group: the ranks that share the work, None for one."""
        learning = config.learning
        assert (reference is not None) == (learning.kl_beta > 0), "a reference model is for kl_beta above 0"
        self._group = group
        self._ranks: Ranks = ONE_RANK if group is None else group.steps
        self._publishing: Ranks = ONE_RANK if group is None else group.publishing
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
        self._budget = Budget(learning.micro_batch_tokens)
        self._durable: set[int] = set()
        self._training = False
        self._rules = batch_rules(learning, policy.vocabulary)
        self._auditor = Auditor(policy, self._snapshots, config.audited_rows, self._rules, self._ranks)
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
        group: Group | None = None,
        keep_base: BaseKeeper | None = None,
    ) -> TorchLearner:
        """Load the newest whole checkpoint of the run, or begin at step 0 with the warm start. Blocking.

        gold: pairs of the warm start, needed when ``model.warm_start_steps`` is above 0 and there is no checkpoint.
        model_dir: what ``resolve_model`` returned, where the caller has it already.
        keep_base: what ``write_snapshot`` needs of version 0 where it is given adapters (``lora.rank`` above 0).
        Raises UserError, ConfigError; IntegrityError when what is on disk is not of this run's model. All ranks of a
        group call it and raise alike.
        """
        device = pick_device(config.learning.device) if group is None else group.device
        set_threads(config, device)
        ranks = ONE_RANK if group is None else group.steps
        folder = model_dir or resolve_model(config.model, run_dir, seed=config.run.seed)
        for path in checkpoint.torn(run_dir / CHECKPOINT_FOLDER):
            LOG.warning("%s is no whole checkpoint (files are missing or cut short) and is not looked at", path)
        found = checkpoint.complete_steps(run_dir / CHECKPOINT_FOLDER)[-1:]
        step = int(ranks.broadcast(str(found[0] if found else -1).encode()))
        if step >= 0 and not resume:
            raise UserError(f"{run_dir} must be new or resumed, it holds a checkpoint of step {step}: pass --resume")
        if step >= 0:
            return cls._resumed(config, run_dir, run_id, folder, device, step, write_snapshot, group, keep_base)
        policy, initial = first_policy(config, run_dir, folder, device, group, gold, keep_base)
        state = checkpoint.LearnerState(0, "", initial, config_digest(config), run_id, model_digest(folder))
        reference = reference_of(policy, config, run_dir, folder, initial, group)
        return cls(config, run_dir, run_id, policy, state, write_snapshot, reference, group)

    @classmethod
    def _resumed(
        cls,
        config: Config,
        run_dir: Path,
        run_id: str,
        folder: Path,
        device: torch.device,
        step: int,
        write_snapshot: SnapshotWriter,
        group: Group | None,
        keep_base: BaseKeeper | None,
    ) -> TorchLearner:
        root = run_dir / CHECKPOINT_FOLDER
        ranks = ONE_RANK if group is None else group.steps
        state = together(ranks, lambda: checkpoint.load_state(root, step))
        if state.run_id != run_id:
            raise UserError(f"the checkpoints in {run_dir} must be of run {run_id}, they are of run {state.run_id}")
        if state.config_digest != config_digest(config):
            LOG.warning("model or learning settings differ from those the checkpoint of step %d was made with", step)
        together(ranks, lambda: require_same_model(folder, state.model_digest, step))
        initial = state.initial_weights_hash
        policy = resumed_policy(config, run_dir, folder, device, group, initial, keep_base)
        reference = reference_of(policy, config, run_dir, folder, initial, group)
        learner = cls(config, run_dir, run_id, policy, state, write_snapshot, reference, group)
        restore(policy, learner._optimizer, root, step, group)
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

    @property
    def policy(self) -> PolicyModel:
        """The model that is trained; its weights change in ``train_step`` only, in place."""
        return self._policy

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
            self._state = msgspec.structs.replace(self._state, step=self.step + 1, last_batch_digest=batch.digest)
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
            await asyncio.to_thread(keep, self._checkpoints, held, self._group)
            self._durable.add(held.step)
            if self._publishing.rank == 0:
                await asyncio.to_thread(checkpoint.prune, self._checkpoints, self._config.checkpoint.keep)

    async def write_snapshot(self, incarnation: int, frozen: Frozen | None = None) -> tuple[Manifest, Path]:
        """The weights in ``model.snapshot_dtype``, as policy (incarnation, frozen step). Raises DiskFull.

        For rank 0 of a group; the others ``serve_snapshot``.
        """
        held = await self._held(frozen)
        policy = Policy(incarnation, held.step)
        folder = self._snapshots / str(policy)
        dtype = self._config.model.snapshot_dtype

        def write() -> Manifest:
            with gathered(held.weights, held.shapes, self._publishing) as tensors:
                assert tensors is not None, "only rank 0 writes"
                return self._writer(
                    as_snapshot(tensors, dtype),
                    held.aliases,
                    run_id=self._run_id,
                    policy=policy,
                    dtype=dtype,
                    folder=folder,
                )

        return await asyncio.to_thread(write), folder

    async def serve_snapshot(self, frozen: FrozenState) -> None:
        """Give rank 0 the rows that it asks for."""
        await asyncio.to_thread(serve, frozen.weights, frozen.shapes, self._publishing)

    async def discard_snapshots(self, keep: int) -> None:
        await asyncio.to_thread(discard_older, self._snapshots, keep)

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
        set_threads(self._config, self._policy.device)
        several = self._group is not None
        moments = optimizer_tensors(self._optimizer, self._policy.parameters(), several_ranks=several)
        return self._freezer.freeze(self._state, self._policy.stored(), self._policy.aliases, moments)

    def _audit(self, reply: BatchReply) -> tuple[RowAudit, ...]:
        set_threads(self._config, self._policy.device)
        return self._auditor.audit(reply)

    def _train(self, reply: BatchReply) -> dict[str, float]:
        """Runs in a thread of its own, alone."""
        set_threads(self._config, self._policy.device)
        began_s = time.perf_counter()
        batch = form_training_batch(reply, self._rules)
        if batch.unusable_rows:
            LOG.warning("step %d: %d rows cannot be trained on and are left out", reply.step, batch.unusable_rows)
        try:
            statistics = run_updates(
                batch, self._policy, self._reference, self._optimizer, self._settings, self._ranks, self._budget
            )
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self._budget) from error
        if statistics["updates"]:
            require_finite(
                self._policy.parameters(),
                f"the weights after step {reply.step}",
                f"lower learning.lr, which is {self._config.learning.lr:g}, and resume from the newest checkpoint",
                self._ranks,
            )
        if statistics["updates_not_finite"]:
            LOG.warning("step %d: an update's gradient was not finite and was skipped", reply.step)
        if statistics["trainable_tokens"] == 0:
            LOG.warning("step %d: no token carries loss, the weights are unchanged", reply.step)
        statistics |= batch.counts
        return statistics | {"lr": self._config.learning.lr, "step_s": time.perf_counter() - began_s}
