"""Checkpoints of several ranks, by torch's distributed checkpoint (DCP) in its safetensors form.

Invariant: a checkpoint is whole or absent, as ``checkpoint.py`` says: every rank writes and syncs a file of its own
rows into a folder aside, and once all have, rank 0 renames it and writes the marker. Rows are read back by whoever
needs them now, so any number of ranks goes on from the files of any other, one rank's included.

Of DCP's forms this is the one without pickled metadata (I9): each file's header says which rows it holds.
"""

from __future__ import annotations

import errno
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from echo2.errors import DiskFull, IntegrityError
from echo2.learning import checkpoint
from echo2.learning.frozen import FrozenState
from echo2.learning.ranks import Ranks, together
from echo2.learning.sharding import like
from echo2.learning.torch_ranks import Group, first_line
from echo2.learning.weights import Kind


def save(root: Path, held: FrozenState, group: Group) -> None:
    """Every rank calls it. Raises DiskFull on all of them when it befell one."""
    ranks, state = group.publishing, held.state
    partial = checkpoint.partial_of(root, state.step)
    together(ranks, lambda: checkpoint.begin(root, state.step) if ranks.rank == 0 else None)
    tensors: dict[str, Any] = {
        name: like(own, held.shapes[name], group.host_mesh) if name in held.shapes else own
        for name, own in {**held.weights, **held.optimizer}.items()
    }
    try:
        with _told(partial):
            writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
            save_parts(tensors, storage_writer=writer, process_group=ranks.group)
    except (DiskFull, IntegrityError):
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk wants its bytes back
        raise
    digests = _digests(partial, ranks)
    together(ranks, lambda: checkpoint.finish(root, state, digests) if ranks.rank == 0 else None)


def _digests(folder: Path, ranks: Ranks) -> dict[str, str]:
    """Of all files with tensors: each rank reads its share of them."""

    def own() -> dict[str, str]:
        with checkpoint.readable(folder):
            names = sorted(path.name for path in folder.glob("*.safetensors"))
            return {name: checkpoint.digest_of(folder / name) for name in names[ranks.rank :: ranks.world]}

    told = ranks.gather(msgspec.msgpack.encode(together(ranks, own)))
    return {name: digest for one in told for name, digest in msgspec.msgpack.decode(one, type=dict[str, str]).items()}


def kinds_in(folder: Path) -> dict[str, Kind]:
    """What a checkpoint holds, of whichever form. Raises IntegrityError."""
    with checkpoint.readable(folder):
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: Kind(entry.properties.dtype, tuple(entry.size))
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on one rank. Raises IntegrityError."""
    tensors = {name: torch.empty(kind.shape, dtype=kind.dtype) for name, kind in kinds_in(folder).items()}
    with _told(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process reads is meant
        load_parts(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


def read_into(folder: Path, tensors: Mapping[str, Tensor], group: Group) -> None:
    """Every rank calls it and gets its own rows of each tensor, in place. Raises IntegrityError."""
    ranks = group.steps
    together(ranks, lambda: checkpoint.verify(folder, ranks.rank, ranks.world))
    with _told(folder):
        reader = HuggingFaceStorageReader(str(folder))
        load_parts(dict(tensors), storage_reader=reader, process_group=group.steps.group)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """DCP tells every rank what befell one; here it becomes one of our sentences."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{folder} could not be written: its disk is full; free space there") from error
        raise IntegrityError(
            f"the checkpoint {folder} must be readable and writable, got: {first_line(causes[0])}"
        ) from error
    except (OSError, SafetensorError) as error:
        raise IntegrityError(
            f"the checkpoint {folder} must be readable, got: {error}; remove it for an older"
        ) from error
