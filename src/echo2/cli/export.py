"""``echo2 export``: a version of a run as a Hugging Face model directory."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo2.cli.output import JsonFlag, print_json

if TYPE_CHECKING:
    from echo2.config.root import Config
    from echo2.run.folder import RunFolder
    from echo2.types import Policy

INITIAL_NAME = "initial.safetensors"
"""Beside the checkpoints: version 0 of a run with a warm start."""
_VERSION = re.compile(r"(?:(\d{1,15})\.)?(\d{1,15})")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or the run's configuration file.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Model directory to make.")],
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="v", help="Version, or incarnation.version; the newest by default."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with adapters, write these alone, in PEFT's form.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a kept version of a run as a model directory that transformers loads."""
    from echo2.broadcast.places import beside, check_free, users_paths
    from echo2.cli.adapters import write_adapter
    from echo2.cli.inputs import run_folder

    folder = run_folder(run)
    kept = kept_versions(folder)
    policy = _chosen(sorted(kept), version, folder.root)
    with users_paths():
        check_free(out, folder=beside(out, ".partial"))
        dtype = (
            write_adapter(kept[policy], folder.load(), out)
            if adapter
            else write_model(kept[policy], folder.root / "assets", out)
        )
    facts = {"folder": out, "policy": str(policy), "dtype": dtype, "adapter": adapter, "from": kept[policy]}
    what = "the adapter of version" if adapter else "version"
    print_json(facts) if as_json else print(f"{what} {policy} of {folder.root} is in {out}")


def with_newest(config: Config, run: Path, into: Path) -> tuple[Config, str]:
    """The configuration of run folder ``run`` with the newest version kept there as its model, laid out in ``into``,
    and what to call it; as it is, and an empty name, where none is kept or no model is loaded."""
    from echo2.cli.inputs import run_folder
    from echo2.rollout.engines import WITHOUT_MODEL

    folder = run_folder(run)
    kept = kept_versions(folder)
    if not kept or config.rollout.engine in WITHOUT_MODEL:
        return config, ""
    newest = max(kept)
    write_model(kept[newest], folder.root / "assets", into)
    model = config.model.model_copy(update={"path": str(into)})
    return config.model_copy(update={"model": model}), f"version {newest} of {run}"


def kept_versions(folder: RunFolder) -> dict[Policy, Path]:
    """Versions and where they lie: snapshots on the coordinator's shelf, and checkpoints of versions that have none,
    version 0 among them where a warm start made it."""
    from echo2.transport.partial import MANIFEST_NAME
    from echo2.types import Policy

    found: dict[Policy, Path] = {}
    for manifest in folder.root.glob(f"snapshots/*/{MANIFEST_NAME}"):
        match = _VERSION.fullmatch(manifest.parent.name)
        if match and match[1]:
            found[Policy(int(match[1]), int(match[2]))] = manifest.parent
    incarnation = max((policy.incarnation for policy in found), default=0)
    for marker in folder.checkpoints.glob("step-*/COMPLETE.json"):
        step = marker.parent.name.removeprefix("step-")
        if step.isdigit():
            found.setdefault(Policy(incarnation, int(step)), marker.parent)
    warm = folder.checkpoints / INITIAL_NAME
    if warm.is_file():
        found.setdefault(Policy(0, 0), warm)
    return found


def _chosen(kept: list[Policy], version: str | None, root: Path) -> Policy:
    """The newest, the one asked for, or of several incarnations' the newest that has this version. Raises UserError."""
    from echo2.errors import UserError

    if not kept:
        raise UserError(f"a run must have published a version before it can be exported, and {root} holds none")
    if version is None:
        return kept[-1]
    match = _VERSION.fullmatch(version)
    if not match:
        raise UserError(f"--version must be a version such as 4, or incarnation.version such as 0.4, got {version}")
    fitting = [p for p in kept if p.version == int(match[2]) and (not match[1] or p.incarnation == int(match[1]))]
    if not fitting:
        raise UserError(f"version {version} is not kept; kept are {', '.join(str(p) for p in kept)}")
    return fitting[-1]


def write_model(source: Path, assets: Path, out: Path) -> str:
    """Weights of ``kept_versions`` beside the model's small files, whole or absent; return their element type."""
    from echo2.broadcast.places import beside, made_in
    from echo2.durable import publish_folder

    with made_in(beside(out, ".partial"), out) as aside:
        for path in sorted(assets.iterdir()) if assets.is_dir() else []:
            shutil.copyfile(path, aside / path.name)
        if source.name == INITIAL_NAME:
            dtype = _from_master_weights(source, aside)
        else:
            dtype = (
                _from_checkpoint(source, aside) if source.name.startswith("step-") else _from_snapshot(source, aside)
            )
        config = aside / "config.json"
        if config.is_file():
            keys = json.loads(config.read_bytes())
            keys.pop("torch_dtype", None)
            config.write_text(json.dumps({**keys, "dtype": dtype}, indent=2, sort_keys=True) + "\n")
        publish_folder(aside, out)
    return dtype


def _from_snapshot(source: Path, into: Path) -> str:
    """A snapshot's object is an ordinary model file."""
    from echo2.broadcast.pack import verify_directory
    from echo2.transport.partial import OBJECT_NAME

    manifest = verify_directory(source)
    shutil.copyfile(source / OBJECT_NAME, into / OBJECT_NAME)
    return manifest.dtype


def _from_master_weights(source: Path, into: Path) -> str:
    from safetensors.torch import load_file, save_file

    from echo2.transport.partial import OBJECT_NAME

    save_file(load_file(source), into / OBJECT_NAME, metadata={"format": "pt"})
    return "float32"


def _from_checkpoint(source: Path, into: Path) -> str:
    """Master weights; Hugging Face loaders want to be told that they are PyTorch's."""
    from safetensors.torch import save_file

    from echo2.cli.adapters import are_adapters, merge_checkpoint
    from echo2.learning.checkpoint import load
    from echo2.transport.partial import OBJECT_NAME

    version = int(source.name.removeprefix("step-"))
    found = load(source.parent, version).weights
    if are_adapters(found):
        return merge_checkpoint(found, version, source.parent.parent, into / OBJECT_NAME)
    weights = {name: value.float() if value.is_floating_point() else value for name, value in found.items()}
    save_file(weights, into / OBJECT_NAME, metadata={"format": "pt"})
    return "float32"
