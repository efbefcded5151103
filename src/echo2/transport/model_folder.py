"""Which files of a model directory are opened.

Invariant (E03): a model directory comes from elsewhere, so neither a name nor a link in it leads out of it: a path that
leaves this module lies in the directory, or among the blobs of the hub cache that the directory belongs to.
"""

from __future__ import annotations

import json
from pathlib import Path

from echo2.errors import UserError
from echo2.transport.assets import is_asset_name
from echo2.transport.partial import OBJECT_NAME

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
ASSET_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Configuration, tokenizer, chat template, vocabulary."""
WEIGHTS_SUFFIX = ".safetensors"


def own_file(folder: Path, name: str) -> Path | None:
    """Where ``folder``/``name`` really lies; None when there is no such file. Raises UserError when it leads out."""
    if not (folder / name).is_file():
        return None
    home, target = folder.resolve(), (folder / name).resolve()
    if not target.is_relative_to(home) and target.parent not in _blobs_of(home):
        raise UserError(
            f"{folder / name} must not lead out of its directory, it leads to {target}: put a copy of the file there"
        )
    return target


def check_links(folder: Path) -> None:
    """Raises UserError when a file of the directory that a loader may open is a link out of it."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and path.suffix in ASSET_SUFFIXES | {WEIGHTS_SUFFIX}:
            own_file(folder, path.name)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the directory's weights, in the order of their names. Raises UserError.

    One file goes before an index, as it does for transformers.
    """
    if _names_weights(folder):
        raise UserError(
            f"{folder / CONFIG_NAME} must leave transformers_weights out: weights are read from {OBJECT_NAME} or "
            f"{INDEX_NAME}; rename the file and remove the key"
        )
    if (single := own_file(folder, OBJECT_NAME)) is not None:
        return [single]
    index = own_file(folder, INDEX_NAME)
    if index is None:
        raise UserError(f"{folder} must hold {OBJECT_NAME} or {INDEX_NAME}; convert the weights to safetensors first")
    return [_indexed(folder, name) for name in _names_in(index, folder / INDEX_NAME)]


def _blobs_of(home: Path) -> list[Path]:
    """A hub cache links snapshots/<revision>/<name> to blobs/<hash> beside snapshots/; no other way out is taken."""
    return [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]


def _indexed(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or not is_asset_name(name) or not name.endswith(WEIGHTS_SUFFIX):
        raise UserError(
            f"{folder / INDEX_NAME} must name safetensors files beside it, got {str(name)[:80]!r}: do not load it"
        )
    if (target := own_file(folder, name)) is None:
        raise UserError(f"{folder / name} is named by the index and missing; copy or download it again")
    return target


def _names_in(index: Path, told: Path) -> list[object]:
    try:
        names: list[object] = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = []
    if not names:
        raise UserError(f"{told} must hold a JSON object with a weight_map that names files; save the model again")
    return names


def _names_weights(folder: Path) -> bool:
    """Whether the configuration sends transformers to a weights file of its own choice."""
    config = own_file(folder, CONFIG_NAME)
    try:
        keys = json.loads(config.read_bytes()) if config is not None else {}
    except (ValueError, RecursionError):
        return False  # whoever needs the configuration tells what is wrong with it
    return isinstance(keys, dict) and keys.get("transformers_weights") is not None
