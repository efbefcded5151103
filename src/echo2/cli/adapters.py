"""What ``echo2 export`` writes of a run with adapters: merged weights, or the adapters alone in PEFT's form.

Invariant: adapters from the shelf are, byte for byte, the object that workers were sent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo2.config.root import Config

CONFIG_NAME = "adapter_config.json"
PREFIX = "base_model.model."


def write_adapter(source: Path, config: Config, out: Path) -> str:
    """Adapters of a version of ``kept_versions`` as a directory that PEFT loads, whole or absent; their element type.

    Raises UserError for a version that has none.
    """
    from echo2.broadcast.lora import ADAPTER_NAME
    from echo2.broadcast.places import beside, made_in
    from echo2.durable import publish_folder

    with made_in(beside(out, ".partial"), out) as aside:
        path = aside / ADAPTER_NAME
        dtype = (
            _from_checkpoint(source, config.lora.alpha, path)
            if source.name.startswith("step-")
            else _from_shelf(source, path)
        )
        (aside / CONFIG_NAME).write_text(json.dumps(peft_config(config, path), indent=2, sort_keys=True) + "\n")
        publish_folder(aside, out)
    return dtype


def peft_config(config: Config, adapters: Path) -> dict[str, Any]:
    """PEFT's description of an adapter file. A warm start's version 0 has no name of its own to be found by."""
    from safetensors import safe_open

    with safe_open(adapters, "np") as file:
        names = sorted(file.keys())
    targets = sorted({name.rsplit(".", 3)[1] for name in names})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "" if config.model.warm_start_steps else config.model.path,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def are_adapters(weights: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's tensors are adapters, and not a model's."""
    return bool(weights) and all(name.startswith(PREFIX) and ".lora_" in name for name in weights)


def merge_checkpoint(weights: Mapping[str, Any], version: int, run: Path, out: Path) -> str:
    """Write version 0 with a checkpoint's adapters added as file ``out``, in the element type of snapshots.

    Raises UserError when the run folder does not hold version 0.
    """
    from echo2.errors import UserError
    from echo2.learner.adapters import BASE_FOLDER, merged_snapshot
    from echo2.run.folder import RunFolder
    from echo2.transport.partial import OBJECT_NAME

    alpha = RunFolder(run).load().lora.alpha
    bases = sorted((run / BASE_FOLDER).glob("*.0"), key=lambda path: int(path.stem))
    if not bases:
        raise UserError(
            f"{run / BASE_FOLDER} must hold version 0, to which adapters are added; it does not: export a version on"
            " the coordinator's shelf"
        )
    adapters = out.with_name(out.name + ".adapters")
    _write(weights, alpha, version, adapters)
    made = out.with_name(out.name + ".made")
    dtype = merged_snapshot(bases[-1], adapters, made)
    os.replace(made / OBJECT_NAME, out)
    shutil.rmtree(made)
    adapters.unlink()
    return dtype


def _from_checkpoint(source: Path, alpha: float, path: Path) -> str:
    from echo2.learning.checkpoint import load

    version = int(source.name.removeprefix("step-"))
    weights = load(source.parent, version).weights
    if not are_adapters(weights):
        raise _none(source)
    _write(weights, alpha, version, path)
    return "float32"


def _from_shelf(source: Path, path: Path) -> str:
    import msgspec

    from echo2.broadcast.manifest import SignedManifest
    from echo2.broadcast.parse import LORA, parse_manifest
    from echo2.broadcast.version import SIGNED
    from echo2.errors import IntegrityError
    from echo2.transport.partial import object_is_whole
    from echo2.types import SnapshotKind

    found = source / SnapshotKind.DELTA.value
    signed = found.with_name(found.name + SIGNED)
    if not signed.is_file():
        raise _none(source)
    manifest = parse_manifest(msgspec.msgpack.decode(signed.read_bytes(), type=SignedManifest).manifest)
    if manifest.codec != LORA:
        raise _none(source)
    if not object_is_whole(found, manifest):
        raise IntegrityError(f"{found} is not what its manifest says: export another version")
    shutil.copyfile(found, path)
    return manifest.dtype


def _write(weights: Mapping[str, Any], alpha: float, version: int, path: Path) -> None:
    from echo2.broadcast.lora import write_adapters
    from echo2.learning.weights import Tensors, as_snapshot
    from echo2.types import Policy

    write_adapters(as_snapshot(Tensors.of(weights), "float32"), alpha, Policy(0, version), path)


def _none(source: Path) -> Exception:
    from echo2.errors import UserError

    return UserError(
        f"--adapter is for versions that are adapters of version 0, and {source} is none: leave --adapter out, or"
        " choose a later version of a run with lora.rank above 0"
    )
