"""An object on its way from the learner to the shelf.

Invariant (I6): what ``received`` counts is right chunks from the first on, without a hole. The folder of an upload
becomes the version's own, so what it holds is named as there: a raw snapshot is ``model.safetensors``, a delta
``delta``. ``offer.json`` says what was offered, so that an upload goes on after a restart without a new offer.
"""

from __future__ import annotations

from pathlib import Path

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest, parse_manifest
from echo2.broadcast.relay.chunks import ChunkFile
from echo2.durable import remove_folder, room_for, write_file
from echo2.errors import IntegrityError, Malformed, Refused
from echo2.transport.partial import OBJECT_NAME, object_is_whole

OFFER_NAME = "offer.json"


class Upload:
    """Blocking: call it in a thread. Close it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Go on with the file in ``folder``, whose offer this is."""
        self.folder = folder
        self.manifest = manifest
        self.path = folder / file_name(manifest)
        self._file = ChunkFile(self.path, manifest)
        self._next = 0
        self._advance()

    @classmethod
    def begin(cls, folder: Path, manifest: Manifest) -> Upload:
        """Continue the same offer, or start over for another one of the same version. Raises DiskFull."""
        offer, path = encode_manifest(manifest), folder / OFFER_NAME
        if not path.is_file() or path.read_bytes() != offer:
            remove_folder(folder)
        with room_for(folder):
            folder.mkdir(exist_ok=True)
            write_file(path, offer)
        return cls(folder, manifest)

    @classmethod
    def resume(cls, folder: Path) -> Upload | None:
        """The upload that an earlier life left in ``folder``, if there is one."""
        path = folder / OFFER_NAME
        return cls(folder, parse_manifest(path.read_bytes())) if path.is_file() else None

    @property
    def received(self) -> int:
        """Bytes of the right chunks from the first on."""
        return min(self._next * self.manifest.chunk_size, self.manifest.object_size)

    def write(self, offset: int, data: bytes) -> int:
        """Take whole chunks that follow ``received``; return the new ``received``. A piece taken before is confirmed.

        Raises Refused for another offset, Malformed for a cut chunk, IntegrityError for a wrong one, DiskFull; right
        chunks before a fault are taken.
        """
        manifest, end = self.manifest, offset + len(data)
        if offset < self.received and end <= self.received:
            return self.received
        if offset != self.received:
            raise Refused(f"the next piece of {manifest.policy} must begin at {self.received}, got {offset}")
        if end > manifest.object_size or (end % manifest.chunk_size and end != manifest.object_size):
            raise Malformed(
                f"{manifest.policy}: a piece must hold whole chunks of {manifest.chunk_size} bytes and end within the "
                f"object's {manifest.object_size}, got {len(data)} bytes at {offset}"
            )
        view = memoryview(data)
        for start in range(0, len(view), manifest.chunk_size):
            chunk = view[start : start + manifest.chunk_size]
            if not self._file.right(self._next, chunk):
                raise IntegrityError(f"{manifest.policy}: chunk {self._next} is not what the manifest says")
            self._file.put(self._next, chunk)
            self._advance()
        return self.received

    def seal(self) -> None:
        """Make the whole object durable and check its root. Raises Refused while it is not whole, IntegrityError."""
        manifest = self.manifest
        if self.received != manifest.object_size:
            raise Refused(f"{manifest.policy} has {self.received} of {manifest.object_size} bytes; upload the rest")
        self._file.seal()
        if not object_is_whole(self.path, manifest):
            raise IntegrityError(f"the object of {manifest.policy} must have root {manifest.object_root[:16]}…")

    def close(self) -> None:
        """Let go of the file, which stays and is continued by a later life."""
        self._file.close()

    def _advance(self) -> None:
        while self._next < len(self.manifest.chunks) and self._file.has(self._next):
            self._next += 1


def file_name(manifest: Manifest) -> str:
    """Name of an object's file in its version's folder."""
    return OBJECT_NAME if manifest.codec == "raw" else manifest.kind.value
