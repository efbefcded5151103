"""How a learner's models come to hold the weights they must.

Invariant: the reference model is version 0, whose hash every checkpoint records; anything else is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from echo2.config.root import Config
from echo2.durable import ASIDE, sync_folder
from echo2.errors import IntegrityError, UserError
from echo2.learning.checkpoint import write_safetensors
from echo2.learning.gathering import gathered, whole_shapes
from echo2.learning.loading import load_causal_lm
from echo2.learning.policy_model import PolicyModel, own_rows
from echo2.learning.ranks import ONE_RANK, Ranks, rows_of, together
from echo2.learning.soundness import require_finite
from echo2.learning.warm_start import GoldBatches, warm_start
from echo2.learning.weights import weights_hash

if TYPE_CHECKING:
    from echo2.learning.torch_ranks import Group

M = TypeVar("M", bound=PolicyModel)

CHECKPOINT_FOLDER = "checkpoints"
"""Inside the run folder."""

INITIAL_WEIGHTS = "initial.safetensors"
"""Beside the checkpoints, where a warm start made version 0 differ from the model directory."""

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")


def set_threads(config: Config, device: torch.device) -> None:
    """OpenMP counts threads per calling thread, and CUDA has a device for each: call it in the one that computes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.learning.threads:
        torch.set_num_threads(config.learning.threads)


def policy_model(config: Config, folder: Path, device: torch.device, group: Group | None = None) -> PolicyModel:
    """The directory's model, ready to train; each rank of a group keeps its part."""
    return model_by(PolicyModel, config, folder, device, group)


def model_by(
    make: Callable[..., M], config: Config, folder: Path, device: torch.device, group: Group | None = None
) -> M:
    """make: takes the causal LM, whole, and the settings of ``PolicyModel``."""
    if group is None:
        return _whole_model(config, folder, device, device, make)
    from echo2.learning.sharding import shard

    def load_and_split() -> M:
        # Loaded and checked in host memory: whole, a model need not fit onto a GPU.
        policy = _whole_model(config, folder, torch.device("cpu"), device, make)
        shard(policy, group.mesh, device)
        return policy

    return _in_turn(group.steps, load_and_split)


def _whole_model(
    config: Config, folder: Path, device: torch.device, computes_on: torch.device, make: Callable[..., M]
) -> M:
    learning = config.learning
    dtype = torch.float64 if learning.compute_dtype == "float64" else torch.float32
    model = load_causal_lm(folder, device, dtype)
    remedy = f"copy or download the model in {folder} again, or choose another"
    require_finite(dict(model.named_parameters()), "the weights of model.path", remedy)
    return make(
        model,
        compute_dtype=learning.compute_dtype,
        logits_chunk_tokens=learning.logits_chunk_tokens,
        activation_checkpointing=learning.activation_checkpointing,
        compiles=learning.compile,
        computes_on=computes_on,
    )


def _in_turn(ranks: Ranks, work: Callable[[], M]) -> M:
    """One rank after the other on each machine, whose memory then holds one whole model at a time."""
    made: list[M] = []
    for turn in range(ranks.here):
        together(ranks, lambda mine=turn == ranks.local: made.append(work()) if mine else None)  # type: ignore[misc]
    return made.pop()


def make_version_0(
    config: Config, run_dir: Path, policy: PolicyModel, gold: GoldBatches | None, ranks: Ranks = ONE_RANK
) -> str:
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
            ranks=ranks,
        )
        _keep_initial(run_dir / CHECKPOINT_FOLDER / INITIAL_WEIGHTS, policy, ranks)
    return _hash(policy, ranks)


def reference_model(
    config: Config,
    run_dir: Path,
    folder: Path,
    device: torch.device,
    initial_weights_hash: str,
    group: Group | None = None,
) -> PolicyModel | None:
    """Version 0, frozen; None when the KL term is off."""
    if config.learning.kl_beta == 0:
        return None
    ranks = ONE_RANK if group is None else group.steps
    reference = policy_model(config, folder, device, group)
    reference.model.requires_grad_(False)
    kept = run_dir / CHECKPOINT_FOLDER / INITIAL_WEIGHTS
    if ranks.broadcast(b"kept" if kept.is_file() else b""):
        as_what, remedy = "the reference of the KL term", "bring the file back, or set learning.kl_beta to 0"
        together(ranks, lambda: install_initial(reference.stored(), kept, ranks, needed_as=as_what, remedy=remedy))
    if _hash(reference, ranks) != initial_weights_hash:
        raise IntegrityError(
            f"the reference of the KL term must be version 0 of this run, but the weights in {folder} have changed:"
            " bring the original model back, or set learning.kl_beta to 0"
        )
    return reference


@torch.no_grad()
def install(policy: PolicyModel, weights: Mapping[str, Tensor], origin: str) -> None:
    """Overwrite the model's tensors. Raises IntegrityError when names or shapes are another model's."""
    targets = policy.stored()
    require_same(targets, {name: tuple(value.shape) for name, value in weights.items()}, origin)
    for name, target in targets.items():
        target.copy_(weights[name])


def require_same(targets: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], origin: str) -> None:
    """Raises IntegrityError when names or shapes are another model's."""
    if targets.keys() != shapes.keys():
        stranger = sorted(targets.keys() ^ shapes.keys())[0]
        raise IntegrityError(f"{origin} must hold this model's tensors; {stranger!r} is on one side only")
    for name, target in targets.items():
        if tuple(target.shape) != shapes[name]:
            raise IntegrityError(f"{origin}: {name} must have shape {list(target.shape)}, got {list(shapes[name])}")


def _hash(policy: PolicyModel, ranks: Ranks) -> str:
    stored = policy.stored()
    with gathered(stored, whole_shapes(stored), ranks) as tensors:
        found = "" if tensors is None else weights_hash(tensors)
    return ranks.broadcast(found.encode()).decode()


def config_digest(config: Config) -> str:
    """Of what training depends on; not of how many ranks share it."""
    learning = config.learning.model_dump_json(exclude={"ranks", "collective_timeout_s"})
    lora = config.lora.model_dump_json() if config.lora.rank else ""
    return blake3((config.model.model_dump_json() + learning + lora).encode()).hexdigest()


def model_digest(folder: Path) -> str:
    """Of config.json, apart from what other versions of transformers write differently."""
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return blake3(
        json.dumps({k: v for k, v in given.items() if k not in _VOLATILE}, sort_keys=True).encode()
    ).hexdigest()


def require_same_model(folder: Path, digest: str, step: int) -> None:
    """Raises IntegrityError where the weights of a checkpoint were trained under another config.json."""
    if digest not in ("", model_digest(folder)):
        raise IntegrityError(
            f"{folder / 'config.json'} must be the one that the checkpoint of step {step} was trained with, and it"
            " differs: bring the run's own model directory back"
        )


def read_rows(file: Any, name: str, target: Tensor, ranks: Ranks) -> None:
    """Overwrite this rank's part of ``target`` with its rows from an open safetensors file, on every rank alike."""
    own = own_rows(target)
    if own is target:
        own.copy_(file.get_tensor(name))
    elif own.numel():
        own.copy_(file.get_slice(name)[slice(*rows_of(ranks.rank, ranks.world, target.shape[0]))])


@torch.no_grad()
def install_initial(targets: Mapping[str, Tensor], path: Path, ranks: Ranks, *, needed_as: str, remedy: str) -> None:
    """Let a model's tensors be version 0 as a warm start left it. Raises IntegrityError."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            require_same(targets, {name: tuple(rows.get_shape()) for name, rows in slices.items()}, str(path))
            for name, target in targets.items():
                read_rows(file, name, target, ranks)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path}, {needed_as}, must be readable, got: {error}: {remedy}") from error


def _keep_initial(path: Path, policy: PolicyModel, ranks: Ranks) -> None:
    stored = policy.stored()
    aside = path.with_name(path.name + ASIDE)
    with gathered(stored, whole_shapes(stored), ranks) as tensors:
        if tensors is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(aside, tensors)
            os.replace(aside, path)
            sync_folder(path.parent)
