"""A learner's weights and optimizer, to a checkpoint and back.

Invariant: whatever number of ranks wrote the checkpoint, whatever number reads it, the weights and moments are the same
bits; a checkpoint of another model is refused before anything is overwritten, on all ranks alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from echo2.errors import IntegrityError
from echo2.learning import checkpoint
from echo2.learning.frozen import FrozenState
from echo2.learning.opening import install, require_same
from echo2.learning.optimizer import blank_moments, load_optimizer, optimizer_tensors
from echo2.learning.policy_model import PolicyModel
from echo2.learning.ranks import ONE_RANK, together
from echo2.learning.soundness import require_finite

if TYPE_CHECKING:
    from echo2.learning.torch_ranks import Group


def keep(root: Path, held: FrozenState, group: Group | None) -> None:
    """Raises DiskFull; every rank of a group calls it and raises alike."""
    if group is None:
        checkpoint.save(root, held.state, held.weights, held.optimizer)
        return
    from echo2.learning import sharded_checkpoint

    sharded_checkpoint.save(root, held, group)


def restore(policy: PolicyModel, optimizer: torch.optim.Optimizer, root: Path, step: int, group: Group | None) -> None:
    """Raises IntegrityError, and UserError for weights that are not finite."""
    if group is not None:
        _restore_rows(policy, optimizer, root, step, group)
    else:
        saved = checkpoint.load(root, step)
        install(policy, saved.weights, f"the checkpoint of step {step}")
        load_optimizer(optimizer, policy.parameters(), saved.optimizer)
    ranks = ONE_RANK if group is None else group.steps
    remedy = f"remove {checkpoint.folder_of(root, step)} for an older one"
    require_finite(policy.parameters(), f"the weights in the checkpoint of step {step}", remedy, ranks)


def _restore_rows(policy: PolicyModel, optimizer: torch.optim.Optimizer, root: Path, step: int, group: Group) -> None:
    from echo2.learning.sharded_checkpoint import kinds_in, read_into

    folder, parameters = checkpoint.folder_of(root, step), policy.parameters()
    kinds = together(group.steps, lambda: kinds_in(folder))
    origin = f"the checkpoint of step {step}"
    shapes = {name: kind.shape for name, kind in kinds.items()}
    weights = policy.stored()
    require_same(weights, {name: shape for name, shape in shapes.items() if "/" not in name}, origin)
    if any(name.endswith("/exp_avg") for name in kinds):
        blank_moments(optimizer, parameters)
    moments = optimizer_tensors(optimizer, parameters, several_ranks=True)
    if strangers := sorted(name for name in moments if shapes.get(name) != tuple(moments[name].shape)):
        raise IntegrityError(f"{origin} must hold this model's optimizer state; {strangers[0]!r} differs or is missing")
    read_into(folder, {**weights, **moments}, group)
    torch.set_rng_state(moments["rng/cpu"])
