"""An object that arrives in pieces and may be interrupted at any byte: what it is, and the file that it becomes.

Invariant (I6): every chunk that an ``ObjectFile`` counts as had matched the hash in the object's description when its
bytes were stored, whoever brought them. Learner's uploads, downloads over HTTP and relays all end in such files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from echo2.durable import remove_folder
from echo2.errors import Malformed
from echo2.types import Policy

OBJECT_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"
PARTIAL = ".partial"
"""Suffix of a snapshot's folder while it is not complete; found after a crash, it is continued."""

_ROOT = re.compile(r"[0-9a-f]{64}", re.ASCII)


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


class ObjectFile(Protocol):
    """The object's file while it fills, chunk by chunk, in any order. Blocking: call it in a thread."""

    def has(self, number: int) -> bool:
        """Whether chunk ``number`` is stored."""
        ...

    def right(self, number: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether ``data`` is chunk ``number`` by its hash."""
        ...

    def put(self, number: int, data: bytes | bytearray | memoryview) -> None:
        """Store a chunk that is ``right``. Raises DiskFull, OSError."""
        ...

    def seal(self) -> None:
        """Make the whole object durable. Raises IntegrityError while chunks are missing, DiskFull."""
        ...


def folder_name(policy: Policy) -> str:
    """``Policy(0, 4)`` → ``0.4``: made by us from two integers, never a string that came from elsewhere (E03)."""
    incarnation, version = policy.incarnation, policy.version
    if type(incarnation) is not int or type(version) is not int or incarnation < 0 or version < 0:
        raise Malformed(f"a policy is two integers from 0, got {incarnation!r} and {version!r}")
    return f"{incarnation}.{version}"


def discard_older(folder: Path, keep: int) -> None:
    """Remove the snapshot folders in ``folder`` but those of the newest ``keep`` policies."""
    if not folder.is_dir():
        return
    policies = []
    for path in folder.iterdir():
        incarnation, dot, version = path.name.partition(".")
        if dot and incarnation.isdecimal() and version.isdecimal():
            policies.append((int(incarnation), int(version), path))
    for _, _, path in sorted(policies)[: max(0, len(policies) - keep)]:
        remove_folder(path)


def is_root(text: str) -> bool:
    """Whether ``text`` can name an object: 64 lower-case hexadecimal digits, so it is also a harmless file name."""
    return _ROOT.fullmatch(text) is not None


def missing_runs(file: ObjectFile, count: int, most: int) -> Iterator[range]:
    """Chunks in [0, count) that ``file`` lacks, as runs of at most ``most``; looked up as the runs are taken."""
    first = 0
    while first < count:
        if file.has(first):
            first += 1
            continue
        end = first + 1
        while end < min(first + most, count) and not file.has(end):
            end += 1
        yield range(first, end)
        first = end


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
