"""Disks and databases in memory.

Invariant: what was acknowledged survives the death of the program that wrote it, and nothing else does, as on a real
disk: these objects belong to the world and outlive the programs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from echo2.broadcast.manifest import Manifest
from echo2.coordinator.history import RunState
from echo2.coordinator.operations import (
    AssetsPut,
    EvalPut,
    Loaded,
    MetricsDropped,
    MetricsPut,
    Operation,
    Outcast,
    OutcastPut,
    Peer,
    PeerPut,
    RunPut,
    Token,
    TokenPut,
)
from echo2.data.groups import (
    Batch,
    BatchesDropped,
    BatchPut,
    Group,
    GroupPut,
    RecordsDropped,
    Row,
    RowKey,
    RowPut,
    RowsMoved,
)
from echo2.transport.messages import AssetFile
from echo2.types import Policy, RowState

T = TypeVar("T")


class MemoryStore:
    """The coordinator's store; a commit takes ``commit_s`` and is lost when the coordinator dies before. One of nothing
    waits for those under way."""

    def __init__(self, commit_s: float = 0.002, peers: Iterable[Peer] = ()) -> None:
        """peers: enrolled already."""
        self._commit_s = commit_s
        self._queue: deque[list[Operation]] = deque()
        self._made = self._applied = 0
        """Commits so far."""
        self._state: RunState | None = None
        self._groups: dict[int, Group] = {}
        self._rows: dict[RowKey, Row] = {}
        self._records: dict[RowKey, bytes] = {}
        self._batches: dict[int, Batch] = {}
        self._assets: tuple[AssetFile, ...] = ()
        self._tokens: dict[str, Token] = {}
        self._peers: dict[str, Peer] = {peer.peer_id: peer for peer in peers}
        self._outcasts: dict[str, Outcast] = {}
        self.metrics: dict[int, bytes] = {}
        self.evals: dict[int, bytes] = {}

    async def commit(self, operations: Sequence[Operation]) -> None:
        if not operations and self._applied == self._made:
            return
        # Kept as they are: an operation is never changed after it was made, and ``load`` gives copies.
        self._made += 1
        number, entry = self._made, list(operations)
        self._queue.append(entry)
        try:
            await asyncio.sleep(self._commit_s)
        except asyncio.CancelledError:
            if self._applied < number:
                entry.clear()
            raise
        # Commits that end at the same moment may wake in any order; they take effect in the order they were made.
        while self._applied < number:
            self._applied += 1
            for operation in self._queue.popleft():
                self._apply(operation)

    async def load(self) -> Loaded:
        counts = Counter(row.state for row in self._rows.values())
        refused = Counter(row.verdict for row in self._rows.values() if row.state is RowState.REFUSED)
        return _copy(
            Loaded(
                state=self._state,
                groups=tuple(self._groups.values()),
                rows=tuple(self._rows.values()),
                batches=tuple(self._batches.values()),
                counts=dict(counts),
                refused_by=dict(refused),
                metrics=tuple(self.metrics.values()),
                evals=tuple(self.evals.values()),
                assets=self._assets,
                tokens=tuple(self._tokens.values()),
                peers=tuple(self._peers.values()),
                outcasts=tuple(self._outcasts.values()),
            )
        )

    async def payloads(self, row_keys: Sequence[RowKey]) -> list[bytes]:
        return [self._records[key] for key in row_keys]

    def _apply(self, operation: Operation) -> None:
        match operation:
            case RunPut(state):
                self._state = state
            case RowPut(row, record):
                self._rows[row.key] = row
                if record is not None:
                    self._records[row.key] = record
            case RowsMoved(keys, state, verdict):
                for key in keys:
                    row = self._rows[key]
                    self._rows[key] = msgspec.structs.replace(row, state=state, verdict=verdict or row.verdict)
            case GroupPut(group):
                self._groups[group.group_id] = group
            case BatchPut(batch):
                self._batches[batch.step] = batch
            case BatchesDropped(first_step):
                self._batches = {step: b for step, b in self._batches.items() if step < first_step}
            case RecordsDropped(before_step):
                self._drop_records(before_step)
            case _:
                self._apply_rare(operation)

    def _apply_rare(self, operation: Operation) -> None:
        match operation:
            case MetricsPut(step, line):
                self.metrics[step] = line
            case MetricsDropped(first_step):
                self.metrics = {step: line for step, line in self.metrics.items() if step < first_step}
            case EvalPut(step, line):
                self.evals[step] = line
            case AssetsPut(assets):
                self._assets = assets
            case TokenPut(token):
                self._tokens[token.digest] = token
            case PeerPut(peer):
                self._peers[peer.peer_id] = peer
            case OutcastPut(outcast):
                self._outcasts[outcast.worker_id] = outcast
            case _:
                raise AssertionError(f"a store must know {type(operation).__name__}")

    def _drop_records(self, before_step: int) -> None:
        kept = {key for step, batch in self._batches.items() if step >= before_step for key in batch.rows}
        self._batches = {step: batch for step, batch in self._batches.items() if step >= before_step - 1}
        rows = self._rows
        self._records = {
            key: record for key, record in self._records.items() if key in kept or rows[key].state is RowState.BUFFERED
        }


def _copy(value: T) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


class MemorySpool:
    """A worker's outbox; belongs to the worker's disk, so a restarted worker finds what the dead one left."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    async def put(self, lease_id: str, payload: bytes) -> None:
        self._kept[lease_id] = payload

    async def remove(self, lease_id: str) -> None:
        self._kept.pop(lease_id, None)

    async def pending(self) -> list[tuple[str, bytes]]:
        return list(self._kept.items())


class MemoryDisk:
    """Files by folder and name, of all the programs of a world."""

    def __init__(self) -> None:
        self.stocks: dict[Path, dict[Policy, Manifest]] = {}
        """Snapshots that lie decoded in each worker's folder."""
        self._files: dict[Path, dict[str, bytes]] = {}
        self._folders: dict[Path, dict[Path, None]] = {}
        """Folders in each folder."""

    def write(self, path: Path, data: bytes) -> None:
        folder = path.parent
        if folder not in self._files:
            self._files[folder] = {}
            while folder.name and folder not in self._folders.setdefault(folder.parent, {}):
                self._folders[folder.parent][folder] = None
                folder = folder.parent
        self._files[path.parent][path.name] = data

    def read(self, path: Path) -> bytes:
        """Raises FileNotFoundError."""
        found = self._files.get(path.parent, {}).get(path.name)
        if found is None:
            raise FileNotFoundError(path)
        return found

    def folders(self, name: str, parent: Path) -> list[Path]:
        """Folders in ``parent`` that hold a file of that name."""
        return sorted(folder for folder in self._folders.get(parent, ()) if name in self._files.get(folder, ()))

    def remove(self, place: Path) -> None:
        """A file, or a folder with all that is in it."""
        self._files.get(place.parent, {}).pop(place.name, None)
        self._files.pop(place, None)
        self._folders.get(place.parent, {}).pop(place, None)
        for folder in list(self._folders.pop(place, ())):
            self.remove(folder)
