"""Checkpoints: everything a bit-exact resume needs, whole or absent.

Invariant: a folder with its marker is a whole checkpoint. Files are written and synced aside, the folder is renamed,
the marker is written last; a finder ignores folders without marker and files of another size than the marker says, so a
process that dies or a disk that fills at any moment leaves the newest earlier checkpoint in force (field report E07).

    checkpoints/step-00000012/weights.safetensors     float32 master weights
                              optimizer.safetensors   moments, by parameter
                              state.json              step, last batch, hashes
                              COMPLETE.json           sizes of the three; last

Nothing in a checkpoint is code or pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echo2.durable import ASIDE, publish_folder, remove_folder, room_for, write_all, write_file
from echo2.errors import IntegrityError
from echo2.learning.weights import host_tensor

MARKER = "COMPLETE.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_PARTIAL = ".partial"
_FOLDER = re.compile(r"step-(\d{8,})")


class LearnerState(msgspec.Struct, frozen=True):
    """What a checkpoint says beside tensors."""

    step: int
    """Training steps the weights hold."""
    last_batch_digest: str
    """Of batch step - 1; empty at step 0."""
    initial_weights_hash: str
    """Of version 0, the reference of the KL term."""
    config_digest: str
    """Of the model and learning sections; a difference is reported on resume, not refused."""
    run_id: str


@dataclass(frozen=True)
class Checkpoint:
    state: LearnerState
    weights: dict[str, Tensor]
    """float32, by the model's own names"""
    optimizer: dict[str, Tensor]
    """`NAME/exp_avg`, `NAME/exp_avg_sq`, `NAME/step`, and `rng/cpu`, `rng/cuda:N`"""


def save(root: Path, state: LearnerState, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> Path:
    """Write the checkpoint of ``state.step`` under ``root``; return its folder. Raises DiskFull, OSError."""
    final = _folder(root, state.step)
    partial = final.with_name(final.name + _PARTIAL)
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with room_for(partial):
            partial.mkdir()
        write_safetensors(partial / WEIGHTS, weights)
        write_safetensors(partial / OPTIMIZER, optimizer)
        write_file(partial / STATE, msgspec.json.encode(state))
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        publish_folder(partial, final)
        write_file(final / MARKER, msgspec.json.encode(sizes))
    except BaseException:
        # A full disk needs the half-written bytes back, or the next attempt could not succeed either.
        shutil.rmtree(partial, ignore_errors=True)
        if not _is_complete(final):
            shutil.rmtree(final, ignore_errors=True)
        raise
    return final


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` whole checkpoints, and what interrupted attempts left."""
    if not root.is_dir():
        return
    for step in complete_steps(root)[:-keep]:
        remove_folder(_folder(root, step))
    for leftover in root.iterdir():
        torn = _FOLDER.fullmatch(leftover.name) and not _is_complete(leftover)
        if torn or leftover.name.endswith((_PARTIAL, ASIDE)):
            shutil.rmtree(leftover, ignore_errors=True)


def complete_steps(root: Path) -> list[int]:
    """Steps of whole checkpoints, rising."""
    if not root.is_dir():
        return []
    found = ((match, path) for path in root.iterdir() if (match := _FOLDER.fullmatch(path.name)))
    return sorted(int(match[1]) for match, path in found if _is_complete(path))


def load(root: Path, step: int) -> Checkpoint:
    """Raises IntegrityError when a whole checkpoint does not hold what it should."""
    folder = _folder(root, step)
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=LearnerState)
        weights, optimizer = load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER)
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise IntegrityError(
            f"the checkpoint {folder} must be readable, got: {error}; remove it for an older"
        ) from error
    if state.step != step:
        raise IntegrityError(f"the checkpoint {folder} must be of step {step}, it says {state.step}; remove it")
    return Checkpoint(state, weights, optimizer)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and sync a safetensors file tensor by tensor, so that no second copy of them exists. Raises DiskFull."""
    hosts = {name: host_tensor(tensors[name]) for name in sorted(tensors)}
    header: dict[str, object] = {}
    end = 0
    for name, tensor in hosts.items():
        begin, end = end, end + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with room_for(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(descriptor, len(text).to_bytes(8, "little") + text)
            for tensor in hosts.values():
                write_all(descriptor, tensor.data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _is_complete(folder: Path) -> bool:
    try:
        sizes = msgspec.json.decode((folder / MARKER).read_bytes(), type=dict[str, int])
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, msgspec.MsgspecError):
        return False
