"""The files of the objects that a relay has or gets.

Invariant: opening may hash gigabytes and deleting may take long, so both happen in a thread of their own, in the order
they were asked for; everybody else only looks up what is open.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.relay.chunks import ChunkFile
from echo2.errors import DiskFull


class Files:
    def __init__(self, folder: Path, owns: bool) -> None:
        """owns: files are made in ``folder`` and removed when closed; else they belong to somebody else."""
        self._folder = folder
        self._owns = owns
        self._lock = threading.Lock()
        self._open: dict[str, ChunkFile] = {}
        self._wishes: Counter[str] = Counter()
        """Times that a file was asked for or dropped, by object."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def path(self, root: str) -> Path:
        return self._folder / root

    def get(self, root: str) -> ChunkFile | None:
        with self._lock:
            return self._open.get(root)

    def adopt(self, manifest: Manifest, path: Path) -> None:
        """A whole, verified file, for reading. Raises IntegrityError, OSError."""
        file = ChunkFile.whole(path, manifest)
        with self._lock:
            before, self._open[manifest.object_root] = self._open.get(manifest.object_root), file
        if before is not None:
            before.close()

    def make(
        self, manifest: Manifest, opened: Callable[[ChunkFile, int], None], failed: Callable[[str, int], None]
    ) -> None:
        """Open, create or look again at the object's file, then call one of the two with the wish's number; see
        ``is_newest``."""
        wish = self._next_wish(manifest.object_root)
        self._jobs.put(lambda: self._make(manifest, lambda file: opened(file, wish), lambda why: failed(why, wish)))

    def drop(self, root: str) -> None:
        """At once for those who look it up; a file that is adopted from now on stays."""
        self._next_wish(root)
        gone = self._take(root)
        self._jobs.put(lambda: self._drop(root, gone))

    def is_newest(self, root: str, wish: int) -> bool:
        """Whether nothing was wished of the object's file since; else what came of the wish is about a file that goes
        or went."""
        return self._wishes[root] == wish

    def _next_wish(self, root: str) -> int:
        self._wishes[root] += 1
        return self._wishes[root]

    def work(self) -> None:
        """Consumes wishes, one at a time; ends by ``close``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Let go of all files; they stay and are continued by a later life."""
        self._jobs.put(None)
        with self._lock:
            files, self._open = list(self._open.values()), {}
        for file in files:
            file.close()

    def _make(self, manifest: Manifest, opened: Callable[[ChunkFile], None], failed: Callable[[str], None]) -> None:
        file = self.get(manifest.object_root)
        try:
            if file is None:
                file = ChunkFile(self.path(manifest.object_root), manifest, reserves=False)
            else:
                file.look_again()
            with self._lock:
                self._open[manifest.object_root] = file
            opened(file)  # chunks may come while the space for all of them is being reserved
            if file.is_new:
                file.reserve()
        except (DiskFull, OSError) as error:
            failed(str(error))

    def _drop(self, root: str, gone: ChunkFile | None) -> None:
        made = self._take(root) if self._owns else None  # by a wish that was waiting when this one came
        for file in (gone, made):
            if file is not None:
                file.close(delete=self._owns)

    def _take(self, root: str) -> ChunkFile | None:
        with self._lock:
            return self._open.pop(root, None)
