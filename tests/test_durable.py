from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo2.durable import allocate

SIZE = 1 << 20


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(opened, b"here before", 100_000)
    yield opened
    os.close(opened)


@pytest.fixture
def cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without the call, as some network file systems are."""

    def fallocate(*arguments: int) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(fallocate=fallocate))


def test_space_is_reserved_and_what_is_there_stays(descriptor: int) -> None:
    allocate(descriptor, SIZE)
    assert 512 * os.fstat(descriptor).st_blocks >= SIZE
    assert os.pread(descriptor, 11, 100_000) == b"here before"


@pytest.mark.usefixtures("cannot")
def test_where_the_file_system_cannot_nothing_is_written(descriptor: int) -> None:
    before = os.fstat(descriptor)
    allocate(descriptor, SIZE)
    after = os.fstat(descriptor)
    assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)


@pytest.mark.usefixtures("cannot")
def test_where_the_file_system_cannot_too_little_room_is_noticed(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(OSError, match="No space left"):
        allocate(descriptor, SIZE)


def test_more_than_any_disk_holds_is_no_space(descriptor: int) -> None:
    with pytest.raises(OSError, match=r"space|large"):
        allocate(descriptor, 1 << 60)
