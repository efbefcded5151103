"""Checkpoints: everything a bit-exact resume needs, whole or absent.

Invariant: a folder with its marker is a whole checkpoint. Files are written and synced aside, the folder is renamed,
the marker is written last; a finder ignores folders without marker and files of another size than the marker says, so a
process that dies or a disk that fills at any moment leaves the newest earlier checkpoint in force (field report E07).
Every file is hashed before it is trusted: a bit that fell over on the disk is a sentence, never a weight.

    checkpoints/step-00000012/weights.safetensors     master weights
                              optimizer.safetensors   moments, by parameter
                              state.json              step, last batch, hashes
                              digests.json            blake3 of the two with tensors
                              COMPLETE.json           sizes of the four; last

Several ranks write a ``shard-*.safetensors`` each instead of the first two (``sharded_checkpoint.py``). Either kind is
read by any number of ranks. Nothing in a checkpoint is code or pickle.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echo2.durable import ASIDE, publish_folder, remove_folder, room_for, write_all, write_file
from echo2.errors import IntegrityError
from echo2.learning.weights import Tensors, host_tensor, safetensors_name

MARKER = "COMPLETE.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
DIGESTS = "digests.json"
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
    model_digest: str = ""
    """Of the model directory's config.json: weights mean nothing under another. Empty in older checkpoints."""


@dataclass(frozen=True)
class Checkpoint:
    state: LearnerState
    weights: dict[str, Tensor]
    """by the model's own names"""
    optimizer: dict[str, Tensor]
    """`NAME/exp_avg`, `NAME/exp_avg_sq`, `NAME/step`, and `rng/cpu`, `rng/cuda:N`"""


def save(root: Path, state: LearnerState, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> Path:
    """Write the checkpoint of ``state.step`` under ``root``; return its folder. Raises DiskFull, OSError."""
    partial = begin(root, state.step)
    with given_back(root, state.step):
        digests = {
            WEIGHTS: write_safetensors(partial / WEIGHTS, Tensors.of(weights)),
            OPTIMIZER: write_safetensors(partial / OPTIMIZER, Tensors.of(optimizer)),
        }
    return finish(root, state, digests)


def begin(root: Path, step: int) -> Path:
    """An empty folder for the tensors of this step's checkpoint. Raises DiskFull."""
    partial = partial_of(root, step)
    with room_for(partial):
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    return partial


def finish(root: Path, state: LearnerState, digests: Mapping[str, str]) -> Path:
    """Let the folder from ``begin`` be the checkpoint, once its tensors are written and synced.

    digests: file name → blake3 of the files with tensors.
    """
    partial, final = partial_of(root, state.step), folder_of(root, state.step)
    with given_back(root, state.step):
        write_file(partial / STATE, msgspec.json.encode(state))
        write_file(partial / DIGESTS, msgspec.json.encode(digests))
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        publish_folder(partial, final)
        write_file(final / MARKER, msgspec.json.encode(sizes))
    return final


@contextmanager
def given_back(root: Path, step: int) -> Iterator[None]:
    """A full disk needs the half-written bytes back, or the next attempt could not succeed either."""
    final = folder_of(root, step)
    try:
        yield
    except BaseException:
        shutil.rmtree(partial_of(root, step), ignore_errors=True)
        if not _is_complete(final):
            shutil.rmtree(final, ignore_errors=True)
        raise


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` whole checkpoints, and what interrupted attempts left."""
    if not root.is_dir():
        return
    for step in complete_steps(root)[:-keep]:
        remove_folder(folder_of(root, step))
    for leftover in root.iterdir():
        half = _FOLDER.fullmatch(leftover.name) and not _is_complete(leftover)
        if half or leftover.name.endswith((_PARTIAL, ASIDE)):
            shutil.rmtree(leftover, ignore_errors=True)


def complete_steps(root: Path) -> list[int]:
    """Steps of whole checkpoints, rising."""
    if not root.is_dir():
        return []
    found = ((match, path) for path in root.iterdir() if (match := _FOLDER.fullmatch(path.name)))
    return sorted(int(match[1]) for match, path in found if _is_complete(path))


def torn(root: Path) -> list[Path]:
    """Folders that would be checkpoints if they were whole: files are missing, or of another size than written."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and not _is_complete(path))


def digest_of(path: Path) -> str:
    """blake3 of a file that lies whole on disk."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Every so-many-th file is what was written, bit for bit. Raises IntegrityError.

    Checkpoints from before there were digests pass.
    """
    with readable(folder):
        if not (folder / DIGESTS).exists():
            return
        digests = msgspec.json.decode((folder / DIGESTS).read_bytes(), type=dict[str, str])
        for name in sorted(digests)[part::parts]:
            if digest_of(folder / name) != digests[name]:
                raise IntegrityError(
                    f"{folder / name} must be as it was written, and its bytes have changed since: bring the file back"
                    " from a copy, or remove the folder for an older checkpoint"
                )


def load(root: Path, step: int) -> Checkpoint:
    """Raises IntegrityError when a whole checkpoint does not hold what it should."""
    state, folder = load_state(root, step), folder_of(root, step)
    verify(folder)
    with readable(folder):
        if (folder / WEIGHTS).exists():
            return Checkpoint(state, load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER))
    from echo2.learning.sharded_checkpoint import read_whole  # of several ranks: the only one-rank use of their code

    tensors = read_whole(folder)
    optimizer = {name: tensors.pop(name) for name in list(tensors) if "/" in name}
    return Checkpoint(state, tensors, optimizer)


def load_state(root: Path, step: int) -> LearnerState:
    """Raises IntegrityError."""
    folder = folder_of(root, step)
    with readable(folder):
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=LearnerState)
    if state.step != step:
        raise IntegrityError(f"the checkpoint {folder} must be of step {step}, it says {state.step}; remove it")
    return state


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn what reading raises into IntegrityError with a sentence."""
    try:
        yield
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise IntegrityError(
            f"the checkpoint {folder} must be readable, got: {error}; remove it for an older"
        ) from error


def write_safetensors(path: Path, tensors: Tensors) -> str:
    """Write and sync a safetensors file tensor by tensor, so that no second copy of them exists; its blake3.

    Raises DiskFull.
    """
    header: dict[str, object] = {}
    end = 0
    for name in sorted(tensors.kinds):
        dtype, shape = tensors.kinds[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": safetensors_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = blake3()
    with room_for(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for data in _parts(text, tensors, list(header)):
                digest.update(data)
                write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return digest.hexdigest()


def _parts(header: bytes, tensors: Tensors, names: Sequence[str]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little") + header
    for name in names:
        yield host_tensor(tensors.read(name)).data


def partial_of(root: Path, step: int) -> Path:
    """Where the checkpoint is written until it is whole."""
    return folder_of(root, step).with_name(folder_of(root, step).name + _PARTIAL)


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _is_complete(folder: Path) -> bool:
    try:
        sizes = msgspec.json.decode((folder / MARKER).read_bytes(), type=dict[str, int])
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, msgspec.MsgspecError):
        return False
