"""A large object that arrives in pieces and may be interrupted at any byte.

Invariant (I6): every byte counted by ``received`` belongs to a chunk whose hash is the one in the description. What a
crash, a full disk or a bad sender leaves behind those bytes is cut off before the next piece is taken. Coordinator
(uploads) and worker (downloads) receive through this same class.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from blake3 import blake3

from echo2.durable import room_for, write_all
from echo2.errors import IntegrityError, Malformed
from echo2.types import Policy

OBJECT_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"
PARTIAL = ".partial"
"""Suffix of a snapshot's folder while it is not complete; found after a crash, it is continued."""


class ObjectDescription(Protocol):
    """The part of a manifest that says what the object's bytes are."""

    @property
    def policy(self) -> Policy: ...
    @property
    def object_size(self) -> int: ...
    @property
    def object_root(self) -> str: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def chunks(self) -> Sequence[str]: ...


def folder_name(policy: Policy) -> str:
    """``Policy(0, 4)`` → ``0.4``: made by us from two integers, never a string that came from elsewhere (E03)."""
    incarnation, version = policy.incarnation, policy.version
    if type(incarnation) is not int or type(version) is not int or incarnation < 0 or version < 0:
        raise Malformed(f"a policy is two integers from 0, got {incarnation!r} and {version!r}")
    return f"{incarnation}.{version}"


class PartialObject:
    """The object's file while it grows. Blocking: call it in a thread. Close it, or use it as a context."""

    def __init__(self, path: Path, description: ObjectDescription) -> None:
        """Open or create ``path`` and keep its longest prefix of right chunks."""
        self._path = path
        self._of = description
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._root = blake3()
        self.received = 0
        try:
            self._keep_right_prefix()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, data: bytes | bytearray | memoryview) -> int:
        """Take whole chunks that follow ``received``; return the new ``received``.

        Raises Malformed for a cut chunk and DiskFull, with nothing taken; IntegrityError for a wrong chunk, with what
        came before it taken.
        """
        view = memoryview(data)
        end = self.received + len(view)
        if end > self._of.object_size or (end % self._of.chunk_size and end != self._of.object_size):
            raise Malformed(
                f"snapshot {self._of.policy}: a piece must hold whole chunks of {self._of.chunk_size} bytes and end "
                f"within the object's {self._of.object_size}, got {len(view)} bytes at {self.received}"
            )
        right = 0
        while right < len(view):
            chunk = view[right : right + self._chunk_length(self.received + right)]
            if not self._is_right(self.received + right, chunk):
                break
            right += len(chunk)
        self._write(view[:right])
        self._root.update(view[:right])
        self.received += right
        if right < len(view):
            number = self.received // self._of.chunk_size
            raise IntegrityError(f"snapshot {self._of.policy}: chunk {number} is not what the manifest says")
        return self.received

    def seal(self) -> None:
        """Check size and root of the whole object and sync it. Raises IntegrityError, DiskFull."""
        if self.received != self._of.object_size or self._root.hexdigest() != self._of.object_root:
            raise IntegrityError(
                f"snapshot {self._of.policy}: the object must be {self._of.object_size} bytes of root "
                f"{self._of.object_root[:16]}…, got {self.received} bytes of root {self._root.hexdigest()[:16]}…"
            )
        with room_for(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _keep_right_prefix(self) -> None:
        while length := self._chunk_length(self.received):
            chunk = os.pread(self._descriptor, length, self.received)
            if not self._is_right(self.received, chunk):
                break
            self._root.update(chunk)
            self.received += length
        os.ftruncate(self._descriptor, self.received)

    def _chunk_length(self, offset: int) -> int:
        return min(self._of.chunk_size, self._of.object_size - offset)

    def _is_right(self, offset: int, chunk: bytes | memoryview) -> bool:
        wanted = self._of.chunks[offset // self._of.chunk_size]
        return len(chunk) == self._chunk_length(offset) and blake3(chunk).hexdigest() == wanted

    def _write(self, view: memoryview) -> None:
        os.lseek(self._descriptor, self.received, os.SEEK_SET)
        try:
            with room_for(self._path):
                write_all(self._descriptor, view)
        except BaseException:
            os.ftruncate(self._descriptor, self.received)
            raise


def object_is_whole(path: Path, description: ObjectDescription) -> bool:
    """Whether the file at ``path`` is exactly the described object. Reads all of it; changes nothing."""
    root = blake3()
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != description.object_size:
                return False
            while block := file.read(4 << 20):
                root.update(block)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return root.hexdigest() == description.object_root
