"""The seams between decisions and the world (PROTOCOL §7).

Invariant: programs below these protocols hold no sockets, threads, files, wall time or random state of their own, so
the same code runs against the real world and in virtual time. Waiting is done with asyncio primitives only; a
virtual-time event loop makes those deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from echo2.broadcast.manifest import Manifest as Manifest
    from echo2.coordinator.operations import Loaded
    from echo2.metrics import Traffic
    from echo2.rollout.engine import Engine as Engine
    from echo2.transport.messages import BatchReply, RelayCertificate, Reply, Request, RowAudit
    from echo2.types import Policy


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never jumps back. Deadlines and rates use this."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for people's eyes only: no decision depends on it (field report H12)."""
        ...


class Ids(Protocol):
    def new(self, prefix: str) -> str:
        """A fresh, unguessable identifier such as ``lease-3f9c…``; counted in simulation."""
        ...


class Transport(Protocol):
    """A client's line to the coordinator."""

    async def call(self, request: Request) -> Reply:
        """Send one request, return its reply.

        Raises TransportError when no answer came in time (retry), Refused when the answer was no.
        """
        ...


class SnapshotSource(Protocol):
    """Where a worker gets the objects of published versions: from relays, or from the coordinator itself."""

    async def bring(self, signed: bytes, manifest: Manifest) -> Path:
        """The object as a whole file, verified chunk by chunk; what an earlier try left is continued (I6).

        ``signed`` is the signed form of ``manifest``. Raises TransportError, Refused when the object is no longer on
        the shelf, IntegrityError, DiskFull.
        """
        ...

    def received(self) -> Mapping[str, int]:
        """Bytes that are here of objects that are not whole, by root."""
        ...

    async def abandon(self, root: str) -> None:
        """The object is not needed any more, whole or not: nothing more of it shall come."""
        ...

    async def forget_before(self, policy: Policy) -> None:
        """Objects of versions older than ``policy`` are not needed any more."""
        ...


class SnapshotStock(Protocol):
    """The verified snapshots on a worker's disk: what it can run, and what deltas apply to."""

    def held(self) -> tuple[Policy, ...]:
        """Oldest first."""
        ...

    def folder(self, policy: Policy) -> Path:
        """Of a held snapshot."""
        ...

    async def build(self, signed: bytes, manifest: Manifest, object_path: Path) -> None:
        """Decode a whole object, a delta onto the held base it names; hold the result once its root is right (I6).

        Raises IntegrityError, DiskFull; what was held before stays.
        """
        ...

    async def tidy(self, installed: Policy | None) -> None:
        """Forget all snapshots but the newest ones and the installed one."""
        ...


class SnapshotSink(Protocol):
    """Where a learner puts the bytes of objects (the coordinator, perhaps on another host)."""

    async def upload(self, manifest: Manifest, path: Path, start: int) -> None:
        """Send the bytes of the object that is the file ``path``, from offset ``start``."""
        ...

    async def upload_asset(self, name: str, path: Path) -> None: ...


class SnapshotPacker(Protocol):
    """Makes small objects of a learner's snapshots."""

    async def delta(self, manifest: Manifest, folder: Path) -> tuple[Manifest, Path] | None:
        """Changes since the newest other snapshot that lies beside ``folder``, as an object in a file.

        None when there is no other, or sending the whole would cost less. Raises DiskFull.
        """
        ...


class Seed(Protocol):
    """The coordinator's own relay, from which objects set out to the workers' relays. Nothing here waits for a line."""

    async def publish(self, root: str) -> None:
        """The object is on the shelf, whole and signed."""
        ...

    async def withdraw(self, root: str) -> None:
        """The object left the shelf."""
        ...

    async def certify(self, peer_id: str, public_key_pem: bytes) -> RelayCertificate:
        """Let the holder of the key be relay ``peer_id``. Raises Malformed."""
        ...

    async def expel(self, peer_id: str) -> None:
        """This peer's relay is sent nothing more and feeds nobody, now and when it comes back."""
        ...

    def traffic(self) -> Traffic: ...


class Spool(Protocol):
    """A worker's durable outbox: a finished group is here until the coordinator gave its verdicts."""

    async def put(self, lease_id: str, payload: bytes) -> None: ...

    async def remove(self, lease_id: str) -> None: ...

    async def pending(self) -> list[tuple[str, bytes]]:
        """What an earlier life left, oldest first."""
        ...


class Store(Protocol):
    """The coordinator's durable memory. Operations of one commit become visible together or not at all."""

    async def commit(self, operations: Sequence[Any]) -> None:
        """Return once the operations, and all committed before them, are durable."""
        ...

    async def load(self) -> Loaded:
        """The state as of the last commit."""
        ...

    async def payloads(self, row_keys: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Record bytes of rows (group, index, attempt), in order."""
        ...


class Frozen(Protocol):
    """The weights and optimizer of one step, held still while the learner trains on."""

    @property
    def step(self) -> int: ...


class Learner(Protocol):
    """The training computation; everything here may take long and is awaited off the event loop.

    To publish beside the next step: ``frozen = await freeze()`` after ``train_step`` has returned, then
    ``save_checkpoint(frozen)`` and ``write_snapshot(incarnation, frozen)`` while the next ``train_step`` runs. Without
    ``frozen`` the two take the current weights, and must not run beside ``train_step``.
    """

    @property
    def step(self) -> int:
        """Training steps the weights hold."""
        ...

    @property
    def last_batch_digest(self) -> str: ...

    async def audit(self, batch: BatchReply) -> tuple[RowAudit, ...]:
        """Compare log-probs of some of the batch's rows with those of the versions they name; never beside a step."""
        ...

    async def train_step(self, batch: BatchReply) -> Mapping[str, float]:
        """Train on the batch (v → v + 1); return the step's statistics."""
        ...

    async def freeze(self) -> Frozen:
        """Copy the current step's state; cheap beside a step."""
        ...

    async def save_checkpoint(self, frozen: Frozen | None = None) -> None:
        """Make the frozen (or current) step durable; whole or absent."""
        ...

    async def write_snapshot(self, incarnation: int, frozen: Frozen | None = None) -> tuple[Manifest, Path]:
        """Write the frozen (or current) weights as an immutable snapshot on local disk."""
        ...

    async def discard_snapshots(self, keep: int) -> None:
        """Forget local snapshot folders older than the newest ``keep``."""
        ...


class SnapshotWriter(Protocol):
    """Writes an immutable snapshot folder: how the learning plane reaches the broadcast plane's format."""

    def __call__(
        self,
        tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]],
        aliases: Mapping[str, str],
        *,
        run_id: str,
        policy: Policy,
        dtype: str,
        folder: Path,
    ) -> Manifest:
        """tensors: name → (safetensors element type, shape, what reads its little-endian bytes); read one by one,
        once each.  aliases: tied name → stored name.

        Blocking; whole or absent. Raises DiskFull, and IntegrityError for tensors that are not of ``dtype``.
        """
        ...


class BaseKeeper(Protocol):
    """Keeps the snapshot of version 0, to which a run with adapters adds those of every later version."""

    def __call__(
        self,
        tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]],
        aliases: Mapping[str, str],
        *,
        known: bool,
    ) -> None:
        """tensors, aliases: as of a ``SnapshotWriter``.  known: the snapshot that an earlier life kept, if it is
        whole, is of these very weights. Blocking. Raises DiskFull."""
        ...


class EventLog(Protocol):
    def emit(self, kind: str, **fields: Any) -> None:
        """One line for people and tools: what happened, when; never needed for correctness."""
        ...
