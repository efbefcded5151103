from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.types import Policy

WriteSnapshot = Callable[..., tuple[Manifest, Path]]
SmallDisk = Callable[[Path, int], AbstractContextManager[None]]
FullDisk = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def snapshot_of(tmp_path: Path) -> WriteSnapshot:
    """Write version ``version``, whose weights follow from it, in chunks of 1 KiB."""

    def write(version: int = 4, elements: int = 3000, name: str = "learner") -> tuple[Manifest, Path]:
        bits = (np.arange(elements) * (version + 1)).astype(np.uint16)
        folder = tmp_path / name / f"0.{version}"
        tensors = {"w": RawTensor.of(bits, "BF16"), "b": RawTensor.of(np.ones(3, np.uint16), "BF16")}
        manifest = write_snapshot(
            tensors, {"head": "w"}, run_id="run", policy=Policy(0, version), dtype="bfloat16", folder=folder,
            chunk_size=1024,
        )  # fmt: skip
        return manifest, folder

    return write


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """A disk with room for so many more bytes: the write that meets the end is cut short, the next one fails."""

    @contextmanager
    def limit(room: int) -> Iterator[None]:
        left = room
        write, pwrite = os.write, os.pwrite

        def within(data: memoryview) -> memoryview:
            nonlocal left
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fitting = data[:left]
            left -= len(fitting)
            return fitting

        with monkeypatch.context() as patch:
            patch.setattr("os.write", lambda descriptor, data: write(descriptor, within(data)))
            patch.setattr("os.pwrite", lambda descriptor, data, at: pwrite(descriptor, within(data), at))
            yield

    return limit


def bytes_in(folder: Path) -> int:
    """Of all files below ``folder``."""
    return sum(
        os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names
    )  # fmt: skip


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    """A disk of so many bytes that holds ``folder``: what is removed there makes room again, what is left does not."""

    @contextmanager
    def limit(folder: Path, capacity: int) -> Iterator[None]:
        write = os.write

        def within(descriptor: int, data: memoryview) -> int:
            room = capacity - bytes_in(folder)
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data[:room])

        with monkeypatch.context() as patch:
            patch.setattr("os.write", within)
            patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=max(capacity - bytes_in(folder), 0)))
            yield

    return limit
