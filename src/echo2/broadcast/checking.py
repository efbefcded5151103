"""Bytes compared with the hashes of their tensors while they pass.

Invariant (I6): what ``end`` lets through is, from the first byte to the last, what the manifest or an earlier reading
said it is; the bytes that were compared are the bytes that were used, there is no second reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from blake3 import blake3

from echo2.broadcast.body import Body, Contents, Weights
from echo2.broadcast.layout import object_order
from echo2.broadcast.manifest import TensorEntry
from echo2.broadcast.planes import shapes_of
from echo2.errors import IntegrityError


class TensorHashes:
    """Compares a body that comes in blocks with the hashes of its tensors, each as soon as it is complete."""

    def __init__(self, entries: Iterable[TensorEntry], fault: Callable[[str], str]) -> None:
        """entries: in object order.  fault: what to say of a tensor of that name which differs."""
        self._waiting = deque(entries)
        self._fault = fault
        self._seen = 0
        self._hash = blake3()

    def update(self, block: memoryview) -> None:
        """Raises IntegrityError."""
        while block:
            self._skip_complete()
            if not self._waiting:
                raise IntegrityError("the object goes on after its last tensor")
            part = block[: self._waiting[0].nbytes - self._seen]
            self._hash.update(part)
            self._seen += len(part)
            block = block[len(part) :]
        self._skip_complete()

    def end(self) -> None:
        """Raises IntegrityError unless all of it has come."""
        self._skip_complete()
        if self._waiting:
            raise IntegrityError(f"the object ended before tensor {self._waiting[0].name!r} was complete")

    def _skip_complete(self) -> None:
        while self._waiting and self._seen == self._waiting[0].nbytes:
            entry = self._waiting.popleft()
            if self._hash.hexdigest() != entry.blake3:
                raise IntegrityError(self._fault(entry.name))
            self._seen, self._hash = 0, blake3()


class CheckedBody(Body):
    """A body that is compared with its hashes while it is read from front to back; excerpts are read besides."""

    def __init__(self, weights: Weights, source: Path) -> None:
        """source: where the weights come from, for people."""
        super().__init__(())
        self._body = weights.body
        self.nbytes = weights.body.nbytes
        self._contents = weights.contents
        self._source = source
        self._begin()

    def read(self, start: int, into: memoryview) -> None:
        """As of a body; a reading that begins at 0 begins the comparison anew. Raises IntegrityError."""
        self._body.read(start, into)
        if start == 0:
            self._begin()
        if start == self._next:
            self._hashes.update(into)
            self._next += len(into)

    def close(self) -> None:
        self._body.close()

    def end(self) -> None:
        """Raises IntegrityError unless all of the body was read, and was right."""
        self._hashes.end()

    def _begin(self) -> None:
        self._next = 0
        self._hashes = TensorHashes(entries_in_order(self._contents), self._fault)

    def _fault(self, name: str) -> str:
        return (
            f"{self._source}: tensor {name!r} must have the bytes that were hashed before, it has others: "
            "the files were damaged or changed; copy or make them again"
        )


def entries_in_order(contents: Contents) -> list[TensorEntry]:
    """As the tensors lie in the object."""
    entries = {entry.name: entry for entry in contents.tensors}
    return [entries[shape.name] for shape in object_order(shapes_of(contents))]
