"""Bytes that are on disk before anyone is told so.

Invariant: a name appears with its whole content or not at all. Content is written aside, synced, renamed over the name,
and the folder is synced; a process that dies at any instant, or a disk that fills, leaves the previous content.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo2.errors import DiskFull

ASIDE = ".aside"
"""Suffix of a file or folder that is not yet, or no longer, the named one; safe to remove when found."""


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write every byte; a full disk may take part of them before it raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Give ``path`` this content, durably and atomically. Raises DiskFull, OSError."""
    aside = path.with_name(path.name + ASIDE)
    with room_for(path):
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            os.fchmod(descriptor, mode)
            write_all(descriptor, data)
            os.fsync(descriptor)
        except OSError:
            aside.unlink(missing_ok=True)  # a full disk wants its bytes back
            raise
        finally:
            os.close(descriptor)
        os.replace(aside, path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames, creations and removals in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(partial: Path, final: Path) -> None:
    """Let the finished folder ``partial`` be ``final``; an older ``final`` is moved away first and then removed.

    Folders cannot be swapped atomically: a crash between the two renames leaves neither, never a mixture.
    """
    old = final.with_name(final.name + ASIDE)
    with room_for(final):
        sync_folder(partial)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(partial, final)
        sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Make ``folder`` vanish at once, then free its bytes; open files stay readable to those who hold them."""
    old = folder.with_name(folder.name + ASIDE)
    shutil.rmtree(old, ignore_errors=True)
    try:
        os.rename(folder, old)
    except FileNotFoundError:
        return
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn "no space left" into DiskFull with a sentence; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path} could not be written: its disk is full; free space there") from error
        raise


def allocate(descriptor: int, size_bytes: int) -> None:
    """Reserve a file's space without writing to it, so that others may write at the same time. Raises OSError.

    Where the file system cannot, it is only seen to that there is room now. The C library's own fallback would write a
    zero into every block, also over what somebody puts there meanwhile.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:  # not Linux
        return _see_room(descriptor, size_bytes)
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(descriptor, 0, 0, size_bytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return _see_room(descriptor, size_bytes)
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return None


def _see_room(descriptor: int, size_bytes: int) -> None:
    status, system = os.fstat(descriptor), os.fstatvfs(descriptor)
    if size_bytes - 512 * status.st_blocks > system.f_bavail * system.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
