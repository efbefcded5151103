"""How a learner comes to its policy, whether it trains all weights or adapters beside frozen ones.

Invariant: adapters are added to version 0 only, warm start included; its hash, which every checkpoint records, says
which that is, and a learner that resumes on other weights is refused before anything is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from echo2.config.root import Config
from echo2.errors import IntegrityError
from echo2.learning.adapters import AdaptedModel, BaseOf, adapt
from echo2.learning.opening import (
    CHECKPOINT_FOLDER,
    INITIAL_WEIGHTS,
    install_initial,
    make_version_0,
    model_by,
    policy_model,
    reference_model,
)
from echo2.learning.policy_model import PolicyModel, Scores
from echo2.learning.ranks import ONE_RANK
from echo2.learning.warm_start import GoldBatches
from echo2.learning.weights import Tensors, as_snapshot, stored_tensors, weights_hash

if TYPE_CHECKING:
    from echo2.learning.torch_ranks import Group
    from echo2.ports import BaseKeeper


def first_policy(
    config: Config,
    run_dir: Path,
    folder: Path,
    device: torch.device,
    group: Group | None,
    gold: GoldBatches | None,
    keep_base: BaseKeeper | None,
) -> tuple[PolicyModel, str]:
    """Version 0, ready to train, and the hash of its weights."""
    ranks = ONE_RANK if group is None else group.steps
    if not config.lora.rank:
        policy = policy_model(config, folder, device, group)
        return policy, make_version_0(config, run_dir, policy, gold, ranks)
    warm = config.model.warm_start_steps > 0
    if warm:  # it trains all weights: adapters are for a model that knows something
        make_version_0(config, run_dir, policy_model(config, folder, device, group), gold, ranks)
    adapted, found = _adapted(config, run_dir, folder, device, group, keep_base, warm=warm)
    torch.manual_seed(config.run.seed)
    return adapted, found


def resumed_policy(
    config: Config,
    run_dir: Path,
    folder: Path,
    device: torch.device,
    group: Group | None,
    initial_weights_hash: str,
    keep_base: BaseKeeper | None,
) -> PolicyModel:
    """The model whose weights, or adapters, a checkpoint overwrites. Raises IntegrityError."""
    if not config.lora.rank:
        return policy_model(config, folder, device, group)
    return _adapted(config, run_dir, folder, device, group, keep_base, warm=True, expected=initial_weights_hash)[0]


def reference_of(
    policy: PolicyModel, config: Config, run_dir: Path, folder: Path, initial_weights_hash: str, group: Group | None
) -> Scores | None:
    """Version 0; None when the KL term is off. Beside adapters it needs no memory of its own."""
    if isinstance(policy, AdaptedModel):
        return BaseOf(policy) if config.learning.kl_beta else None
    return reference_model(config, run_dir, folder, policy.device, initial_weights_hash, group)


def _adapted(
    config: Config,
    run_dir: Path,
    folder: Path,
    device: torch.device,
    group: Group | None,
    keep_base: BaseKeeper | None,
    *,
    warm: bool,
    expected: str = "",
) -> tuple[AdaptedModel, str]:
    """warm: whether version 0 lies beside the checkpoints where a warm start left one.  expected: its hash."""
    ranks = ONE_RANK if group is None else group.steps
    kept = run_dir / CHECKPOINT_FOLDER / INITIAL_WEIGHTS
    initial = kept if ranks.broadcast(b"kept" if warm and kept.is_file() else b"") else None
    found: list[str] = []

    def make(model: Any, **settings: Any) -> AdaptedModel:
        stored, aliases = stored_tensors(model)
        if initial is not None:
            as_what, remedy = "the weights that adapters are trained beside", "bring the file back"
            install_initial(stored, initial, ONE_RANK, needed_as=as_what, remedy=remedy)
        base = Tensors.of(stored)
        found.append(weights_hash(base))
        if expected not in ("", found[0]):
            raise IntegrityError(
                f"adapters must be resumed on the weights that they were trained beside, and those in {folder} are"
                " others: bring the original model back"
            )
        if keep_base is not None and ranks.rank == 0:
            keep_base(as_snapshot(base, config.model.snapshot_dtype), aliases, known=bool(expected))
        adapt(model, config.lora, config.run.seed)
        return AdaptedModel(model, **settings)

    return model_by(make, config, folder, device, group), found[0]
