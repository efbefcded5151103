"""Data sets of the Hugging Face hub as local files.

Invariant: files are chosen by name, and no code of a data set is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from echo2.errors import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_NOT_DATA = re.compile(r"(^|/)(\.|README|dataset_infos?\.json|config\.json|package\.json)")


def split_files(names: Sequence[str], split: str) -> list[str]:
    """The files of a split: those whose name has it as a word, all of the best suffix; every file where none has.

    A data set with files of several splits, none of them ``split``, has none.
    """
    data = [name for name in names if name.endswith(_SUFFIXES) and not _NOT_DATA.search(name)]
    named = [name for name in data if split in re.split(r"[^A-Za-z0-9]+", name)]
    if not named and len(data) == 1:
        named = data
    best = next((suffix for suffix in _SUFFIXES if any(name.endswith(suffix) for name in named)), "")
    return sorted(name for name in named if name.endswith(best))


def fetch_split(dataset: str, split: str, task: str) -> list[str]:
    """Local paths of the split's files, downloaded where the hub's cache has them not. Raises ConfigError."""
    list_files, download = _hub(task)
    try:
        names = split_files(list_files(dataset), split)
        if not names:
            raise ConfigError(f"{task}: data set {dataset} must have files of split {split!r}, found none; set split")
        return [download(dataset, name) for name in names]
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{task}: data set {dataset} must be reachable on the hub ({type(error).__name__}: {reason}); "
            f"download its file and give it as path"
        ) from error


def _hub(task: str) -> tuple[Callable[[str], Sequence[str]], Callable[[str, str], str]]:
    try:
        from huggingface_hub import hf_hub_download, list_repo_files
    except ImportError as error:
        raise ConfigError(f"{task}: hub data sets need huggingface_hub; pip install 'echo2[maths]'") from error

    def list_files(dataset: str) -> Sequence[str]:
        return list(list_repo_files(dataset, repo_type="dataset"))

    def download(dataset: str, name: str) -> str:
        return str(hf_hub_download(dataset, name, repo_type="dataset"))

    return list_files, download
