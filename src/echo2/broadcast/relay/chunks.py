"""An object's file while its chunks arrive in any order.

Invariant (I6): a chunk counts as had only after its bytes matched the manifest's hash: those of an earlier life are
hashed again when the file is opened, since a crash may have left anything. The file has the object's full size and one
name from first to last, so a full disk is noticed before the first byte and the path can be told before it is whole.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from blake3 import blake3

from echo2.broadcast.manifest import Manifest
from echo2.durable import allocate, room_for, sync_folder
from echo2.errors import IntegrityError


class ChunkFile:
    """Thread-safe and blocking. Chunks are numbered from 0; all have ``chunk_size`` bytes except perhaps the last."""

    def __init__(self, path: Path, manifest: Manifest, *, reserves: bool = True) -> None:
        """Create the file and reserve its space, or reopen it and keep the chunks that are right.

        reserves: False leaves a new file's space to a call of ``reserve``, which may take long where the file system
        writes what it reserves. Reopening reads all of the file. Raises DiskFull, with nothing made or changed, and
        OSError.
        """
        self._begin(path, manifest, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        self.is_new = os.fstat(self._descriptor).st_size == 0
        try:
            if reserves or not self.is_new:
                self.reserve()
            if not self.is_new:
                self._find_right_chunks()
        except BaseException:
            os.close(self._descriptor)
            raise

    @classmethod
    def whole(cls, path: Path, manifest: Manifest) -> Self:
        """Open, only for reading, a file whose bytes were verified when it was put there.

        Its size is checked. Raises IntegrityError, OSError.
        """
        self = cls.__new__(cls)
        self._begin(path, manifest, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._is_ours = False
        size = os.fstat(self._descriptor).st_size
        if size != manifest.object_size:
            os.close(self._descriptor)
            raise IntegrityError(f"{path} must have the object's {manifest.object_size} bytes, got {size}")
        for number in range(self.count):
            self._mark(number)
        return self

    def _begin(self, path: Path, manifest: Manifest, descriptor: int) -> None:
        self.path = path
        self.manifest = manifest
        self.count = len(manifest.chunks)
        self.holdings = bytearray(-(-self.count // 8))
        """Bitmap, chunk 0 in the lowest bit of the first byte."""
        self._lacking = self.count
        self._descriptor = descriptor
        self._is_ours = True
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False

    def has(self, number: int) -> bool:
        return bool(self.holdings[number >> 3] & 1 << (number & 7))

    def missing(self) -> int:
        """Chunks that are not had yet."""
        return self._lacking

    def length(self, number: int) -> int:
        """Bytes of a chunk."""
        return min(self.manifest.chunk_size, self.manifest.object_size - number * self.manifest.chunk_size)

    def right(self, number: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether ``data`` is chunk ``number``; False, too, for a number that the object does not have."""
        if not 0 <= number < self.count or len(data) != self.length(number):
            return False
        return blake3(data).hexdigest() == self.manifest.chunks[number]

    def put(self, number: int, data: bytes | bytearray | memoryview) -> None:
        """Store a chunk that the caller found ``right``; a second time is harmless.

        Raises DiskFull, and OSError, also once the file is closed; the chunk is not had then.
        """
        offset, left = number * self.manifest.chunk_size, memoryview(data)
        with self._in_use() as descriptor, room_for(self.path):
            while left:
                written = os.pwrite(descriptor, left, offset)
                left, offset = left[written:], offset + written
        with self._lock:
            self._mark(number)

    def read_into(self, number: int, target: memoryview) -> None:
        """Copy a chunk that is had into ``target``, which has its length.

        A copy, because a mapping would end the process if somebody cut the file short. Raises IntegrityError when the
        file lost the chunk, and OSError, also once the file is closed.
        """
        with self._in_use() as descriptor:
            got = os.preadv(descriptor, [target], number * self.manifest.chunk_size)
        if got != self.length(number):
            raise IntegrityError(f"{self.path} must hold chunk {number} and was cut short; restore the file")

    def look_again(self) -> None:
        """Find the chunks that somebody else wrote into the file since; reads all that are missing. Raises OSError."""
        with self._in_use():
            self._find_right_chunks()

    def seal(self) -> None:
        """Make the whole object durable. Raises IntegrityError while chunks are missing, DiskFull, OSError."""
        if self._lacking:
            raise IntegrityError(f"{self.path} still lacks {self._lacking} of {self.count} chunks")
        with self._in_use() as descriptor, room_for(self.path):
            os.fsync(descriptor)
        sync_folder(self.path.parent)

    def close(self, delete: bool = False) -> None:
        """Let go of the file once the reads and writes under way have ended, and remove it if ``delete``.

        A file opened by ``whole`` belongs to somebody else and is never removed. Closing again does nothing.
        """
        with self._lock:
            self._is_closed = True
            self._close_unused()
        if delete and self._is_ours:
            self.path.unlink(missing_ok=True)

    @contextmanager
    def _in_use(self) -> Iterator[int]:
        """The descriptor, which stays open meanwhile: a closed one's number may already name another file."""
        with self._lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the object's file is closed", str(self.path))
            self._users += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def _close_unused(self) -> None:
        if self._is_closed and not self._users and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def reserve(self) -> None:
        """Give the file the object's size, on disk and not only in name. Raises DiskFull, OSError."""
        size, before = self.manifest.object_size, os.fstat(self._descriptor).st_size
        try:
            with room_for(self.path):
                allocate(self._descriptor, size)
        except BaseException:
            with self._lock:
                self._is_closed = True  # a chunk that is put from now on would be cut off
            os.ftruncate(self._descriptor, before)
            if not before:
                self.path.unlink(missing_ok=True)
            raise
        os.ftruncate(self._descriptor, size)

    def _find_right_chunks(self) -> None:
        block = memoryview(bytearray(min(self.manifest.chunk_size, self.manifest.object_size)))
        for number in range(self.count):
            if self.has(number):
                continue
            read = os.preadv(self._descriptor, [block], number * self.manifest.chunk_size)
            if self.right(number, block[:read]):
                with self._lock:
                    self._mark(number)

    def _mark(self, number: int) -> None:
        bit = 1 << (number & 7)
        if not self.holdings[number >> 3] & bit:
            self.holdings[number >> 3] |= bit
            self._lacking -= 1
