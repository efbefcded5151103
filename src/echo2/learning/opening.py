"""How a learner's models come to hold the weights they must.

Invariant: the reference model is version 0, whose hash every checkpoint records; anything else is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echo2.config.root import Config
from echo2.durable import ASIDE, sync_folder
from echo2.errors import IntegrityError, UserError
from echo2.learning.checkpoint import write_safetensors
from echo2.learning.policy_model import PolicyModel, load_causal_lm
from echo2.learning.warm_start import GoldBatches, warm_start
from echo2.learning.weights import stored_tensors, weights_hash

CHECKPOINT_FOLDER = "checkpoints"
"""Inside the run folder."""

INITIAL_WEIGHTS = "initial.safetensors"
"""Beside the checkpoints, where a warm start made version 0 differ from the model directory."""


def set_threads(config: Config) -> None:
    """OpenMP counts threads per calling thread: call it in the one that computes."""
    if config.learning.threads:
        torch.set_num_threads(config.learning.threads)


def policy_model(config: Config, folder: Path, device: torch.device) -> PolicyModel:
    """The directory's model, ready to train."""
    learning = config.learning
    return PolicyModel(
        load_causal_lm(folder, device),
        compute_dtype=learning.compute_dtype,
        logits_chunk_tokens=learning.logits_chunk_tokens,
    )


def make_version_0(config: Config, run_dir: Path, policy: PolicyModel, gold: GoldBatches | None) -> str:
    """Warm-start the policy where the configuration says so; the hash of its weights."""
    torch.manual_seed(config.run.seed)  # A part of every checkpoint: runs of one seed must have equal ones.
    steps = config.model.warm_start_steps
    if steps:
        if gold is None:
            raise UserError(f"model.warm_start_steps is {steps}, which needs tasks with gold replies; set it to 0")
        warm_start(
            policy,
            gold,
            steps=steps,
            lr=config.model.warm_start_lr,
            micro_batch_tokens=config.learning.micro_batch_tokens,
        )
        _keep_initial(run_dir / CHECKPOINT_FOLDER / INITIAL_WEIGHTS, stored_tensors(policy.model)[0])
    return weights_hash(stored_tensors(policy.model)[0])


def reference_model(
    config: Config, run_dir: Path, folder: Path, device: torch.device, initial_weights_hash: str
) -> PolicyModel | None:
    """Version 0, frozen; None when the KL term is off."""
    if config.learning.kl_beta == 0:
        return None
    reference = policy_model(config, folder, device)
    reference.model.requires_grad_(False)
    kept = run_dir / CHECKPOINT_FOLDER / INITIAL_WEIGHTS
    if kept.is_file():
        install(reference, _read_initial(kept), str(kept))
    if weights_hash(stored_tensors(reference.model)[0]) != initial_weights_hash:
        raise IntegrityError(
            f"the reference of the KL term must be version 0 of this run, but the weights in {folder} have changed:"
            " bring the original model back, or set learning.kl_beta to 0"
        )
    return reference


@torch.no_grad()
def install(policy: PolicyModel, weights: Mapping[str, Tensor], origin: str) -> None:
    """Overwrite the model's tensors. Raises IntegrityError when names or shapes are another model's."""
    targets, _ = stored_tensors(policy.model)
    if targets.keys() != weights.keys():
        stranger = sorted(targets.keys() ^ weights.keys())[0]
        raise IntegrityError(f"{origin} must hold this model's tensors; {stranger!r} is on one side only")
    for name, target in targets.items():
        if target.shape != weights[name].shape:
            shapes = f"{list(target.shape)}, got {list(weights[name].shape)}"
            raise IntegrityError(f"{origin}: {name} must have shape {shapes}")
        target.copy_(weights[name])


def config_digest(config: Config) -> str:
    """Of what training depends on."""
    return blake3((config.model.model_dump_json() + config.learning.model_dump_json()).encode()).hexdigest()


def _read_initial(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(
            f"{path}, the reference of the KL term, must be readable, got: {error}: bring the file back, or set"
            " learning.kl_beta to 0"
        ) from error


def _keep_initial(path: Path, weights: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ASIDE)
    write_safetensors(aside, weights)
    os.replace(aside, path)
    sync_folder(path.parent)
