"""What a learner of adapters writes and sends: version 0 whole, and of every later version its adapters.

Invariant: a later version's snapshot is made of version 0's and the adapters by the very code by which workers make it,
so its manifest says what they will find. Version 0's snapshot stays as long as the run folder.

    <folder>/<incarnation>.0/     version 0, under the policy by which it was published
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from echo2.broadcast.body import Body, Weights, open_snapshot
from echo2.broadcast.layout import TensorShape, object_order
from echo2.broadcast.lora import (
    ADAPTER_NAME,
    Pair,
    blocks_of,
    check_fit,
    lora_manifest,
    read_adapters,
    write_adapters,
)
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.planes import shapes_of
from echo2.broadcast.snapshot import StreamedTensor, load_manifest, verify_snapshot, write_snapshot
from echo2.durable import room_for
from echo2.errors import IntegrityError
from echo2.transport.partial import PARTIAL, folder_name
from echo2.types import Policy

BASE_FOLDER = Path("learner") / "base"
"""Inside the run folder."""
Streams = Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]]


class AdapterSnapshots:
    """Implements ``ports.SnapshotWriter``, whose tensors are adapters here, ``ports.BaseKeeper`` and
    ``ports.SnapshotPacker``."""

    def __init__(self, folder: Path, run_id: str, dtype: str, alpha: float) -> None:
        """dtype: of the run's snapshots."""
        self._folder = folder
        self._run_id = run_id
        self._dtype = dtype
        self._alpha = alpha

    def keep_base(self, tensors: Streams, aliases: Mapping[str, str], *, known: bool) -> None:
        if known and (folder := self._held()) is not None:
            try:
                manifest = load_manifest(folder)
                verify_snapshot(folder, manifest)
                if (manifest.run_id, manifest.dtype) == (self._run_id, self._dtype):
                    return
            except IntegrityError:
                pass  # it is made again
        shutil.rmtree(self._folder, ignore_errors=True)
        self._write_base(Policy(0, 0), _streamed(tensors), aliases)

    def __call__(
        self, tensors: Streams, aliases: Mapping[str, str], *, run_id: str, policy: Policy, dtype: str, folder: Path
    ) -> Manifest:
        if policy.version == 0:
            return self._first(policy, folder)
        base = open_snapshot(self._base())
        with base.body:
            unfinished = folder.with_name(folder.name + PARTIAL)  # ``write_snapshot`` goes on in it
            with room_for(folder):
                unfinished.mkdir(parents=True, exist_ok=True)
            write_adapters(tensors, self._alpha, policy, unfinished / ADAPTER_NAME)
            pairs = read_adapters(unfinished / ADAPTER_NAME, (unfinished / ADAPTER_NAME).stat().st_size)
            made = dict(_made(base, pairs))
            return write_snapshot(made, base.contents.aliases, run_id=run_id, policy=policy, dtype=dtype, folder=folder)

    async def delta(self, manifest: Manifest, folder: Path) -> tuple[Manifest, Path] | None:
        """The adapters of a later version; None for version 0, which is sent whole."""
        return await asyncio.to_thread(self._adapters, manifest, folder)

    def _adapters(self, manifest: Manifest, folder: Path) -> tuple[Manifest, Path] | None:
        path = folder / ADAPTER_NAME
        if not path.is_file():
            return None
        base = open_snapshot(self._base())
        return lora_manifest(manifest, path, base.contents), path

    def _first(self, policy: Policy, folder: Path) -> Manifest:
        """Version 0 as ``folder``; its later ones are adapters of this policy."""
        held = self._base()
        base = open_snapshot(held)
        with base.body:
            made, aliases = dict(_made(base, {})), base.contents.aliases
            if held.name != folder_name(policy):
                self._write_base(policy, made, aliases)
                shutil.rmtree(held, ignore_errors=True)
            return write_snapshot(made, aliases, run_id=self._run_id, policy=policy, dtype=self._dtype, folder=folder)

    def _write_base(self, policy: Policy, tensors: Mapping[str, StreamedTensor], aliases: Mapping[str, str]) -> None:
        folder = self._folder / folder_name(policy)
        write_snapshot(tensors, aliases, run_id=self._run_id, policy=policy, dtype=self._dtype, folder=folder)

    def _base(self) -> Path:
        held = self._held()
        if held is None:
            raise IntegrityError(f"{self._folder} must hold version 0's snapshot, it does not; start the learner again")
        return held

    def _held(self) -> Path | None:
        """The newest policy's, should a crash have left two."""
        found = [path for path in self._folder.glob("*.0") if path.is_dir() and path.stem.isdecimal()]
        return max(found, key=lambda path: int(path.stem), default=None)


def merged_snapshot(base_folder: Path, adapters: Path, out: Path) -> str:
    """Snapshot folder ``out`` of a version whose adapters are the given file; its element type."""
    base = open_snapshot(base_folder)
    with base.body:
        made, of = dict(_made(base, read_adapters(adapters, adapters.stat().st_size))), base.contents
        write_snapshot(made, of.aliases, run_id=of.run_id, policy=of.policy, dtype=of.dtype, folder=out)
    return of.dtype


def _streamed(tensors: Streams) -> dict[str, StreamedTensor]:
    return {name: StreamedTensor(*tensor) for name, tensor in tensors.items()}


def _made(base: Weights, pairs: Mapping[str, Pair]) -> Iterator[tuple[str, StreamedTensor]]:
    """The base's tensors with adapters added; made when they are written."""
    shapes = object_order(shapes_of(base.contents))
    check_fit(pairs, shapes)
    start = 0
    for shape in shapes:
        read = partial(_whole, shape, pairs.get(shape.name), base.body, start)
        yield shape.name, StreamedTensor(shape.dtype, shape.shape, read)
        start += shape.nbytes


def _whole(shape: TensorShape, pair: Pair | None, base: Body, start: int) -> memoryview:
    whole = bytearray()
    for block in blocks_of(shape, pair, base, start):
        whole += block
    return memoryview(whole)
