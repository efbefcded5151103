"""The learner's program: batch, step, report, publish.

Invariant: a version is published only after its checkpoint is durable and acknowledged, and versions are published in
order (PROTOCOL §1); resumed weights are published before the first batch is asked for (field report D05).

    Attach ─▶ [publish] ─▶ ( RequestBatch ─▶ train_step ─▶ ReportStep ─▶ [publish beside the next step] )* ─▶ end

| loop    | consumes | waits for           | unblocked by                | produces                            |
|---------|----------|---------------------|-----------------------------|-------------------------------------|
| steps   | batches  | P admissible groups | workers' groups, a stop     | one report per step                 |
| publish | a step   | disk, then the line | the coordinator's answers   | a durable checkpoint and a snapshot |

A publish is frozen before the next step begins and travels beside it; a second one waits for the first. What of this
held training up is told with the next step: ``snapshot_s``, ``publish_wait_s``. After a crash
nothing is special: the step that the weights hold is attached, and the batches after it are asked for again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import TypeVar

import msgspec

from echo2.broadcast.manifest import Manifest
from echo2.errors import DiskFull, IntegrityError, Refused, Starved, TransportError, first_cause
from echo2.ports import Clock, EventLog, Frozen, Learner, SnapshotPacker, SnapshotSink, Transport
from echo2.transport.messages import (
    MAX_WAIT_S,
    AckCheckpoint,
    AssetFile,
    Attach,
    Attached,
    BatchReply,
    BatchWait,
    Done,
    Leave,
    OfferSnapshot,
    PublishSnapshot,
    ReportStep,
    RequestBatch,
    SnapshotOffer,
    StepAccepted,
)
from echo2.transport.partial import OBJECT_NAME
from echo2.transport.patience import Backoff, Line, Recall, space_out
from echo2.types import Policy

T = TypeVar("T")

Resident = Callable[[Policy], None]
"""Told what the weights are called, as soon as the coordinator knows of that version."""

STOP_PATIENCE_S = 20.0
"""How long a stopping learner waits for a silent coordinator: what it would say is safe on disk."""
KEPT_SNAPSHOTS = 2
"""Local snapshot folders kept at least: the one on its way and the one before it."""


class LearnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    initial_weights_hash: str
    assets: Mapping[AssetFile, Path]
    """Files of the model directory that workers need beside weights, and where they lie."""
    checkpoint_every_publishes: int = 1
    kept_snapshots: int = KEPT_SNAPSHOTS
    """Local snapshot folders."""
    give_up_after_s: float = 1800.0
    """Silence of the coordinator after which the learner ends; its checkpoints are kept."""
    rollback: bool = False
    """The user asked to go on below a published version."""
    jitter_seed: int = 0


class LearnerProgram:
    def __init__(
        self,
        transport: Transport,
        sink: SnapshotSink,
        learner: Learner,
        packer: SnapshotPacker,
        clock: Clock,
        events: EventLog,
        options: LearnerOptions,
        resident: Resident | None = None,
    ) -> None:
        """resident: where an engine runs the learner's own weights."""
        self._sink = sink
        self._learner = learner
        self._packer = packer
        self._clock = clock
        self._events = events
        self._options = options
        self._resident = resident or _nobody
        self._jitter = Random(options.jitter_seed)
        self._line = Line(transport, clock, events, self._jitter, options.give_up_after_s)
        self._stop = Recall()
        self._epoch = 0
        self._publishes = 0
        self._durable_step = -1
        self._publishing: asyncio.Task[None] | None = None

    def stop(self, reason: str) -> None:
        """End after the running step, with its checkpoint."""
        self._events.emit("stopping", reason=reason)
        self._stop.call()

    async def run(self) -> None:
        """Train until the coordinator or the user says stop.

        Raises Fenced when a newer learner attached, Refused when the coordinator's store and these weights do not
        belong together, Starved when the coordinator fell silent.
        """
        try:
            async with asyncio.TaskGroup() as life:
                await self._stop.within(None, "the coordinator's welcome", self._attach())
                await self._steps(life)
                if self._epoch:
                    await self._take_leave()
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            if not (self._stop.called and isinstance(cause, Starved)):
                raise cause from group
            self._events.emit("left_unheard", error=str(cause))
        self._events.emit("learner_done", step=self._learner.step)

    async def _take_leave(self) -> None:
        if self._publishing is not None:
            await self._publishing
        await self._make_durable(await self._learner.freeze())
        await self._line.call(Leave(self._epoch), Done, patience=self._patience_s)

    def _patience_s(self) -> float:
        return STOP_PATIENCE_S if self._stop.called else self._options.give_up_after_s

    async def _attach(self) -> None:
        options = self._options
        request = Attach(
            options.run_id,
            self._learner.step,
            self._learner.last_batch_digest,
            options.initial_weights_hash,
            tuple(options.assets),
            options.rollback,
        )
        attached = await self._line.call(request, Attached)
        self._epoch = attached.epoch
        self._resident(attached.policy)
        self._events.emit("attached", epoch=attached.epoch, step=self._learner.step, policy=str(attached.policy))
        paths = {asset.name: path for asset, path in options.assets.items()}
        for name in attached.missing_assets:
            await self._upload_asset(name, paths[name])
        if attached.publish_needed:
            await self._publish(attached.policy, await self._learner.freeze())

    async def _steps(self, life: asyncio.TaskGroup) -> None:
        """Consumes batches; waits for P admissible groups; unblocked by workers or a stop; produces step reports."""
        held_up = {"publish_wait_s": 0.0, "snapshot_s": 0.0}
        while not self._stop.called:
            waited_from_s = self._clock.monotonic()
            batch = await self._stop.within(None, "a batch", self._next_batch())
            if batch is None:
                return
            began_s = self._clock.monotonic()
            audits = await self._learner.audit(batch)
            stats = {"audit_s": self._clock.monotonic() - began_s, **held_up}
            stats |= await self._learner.train_step(batch)
            took_s, waited_s = self._clock.monotonic() - began_s, began_s - waited_from_s
            report = ReportStep(self._epoch, batch.step, took_s, waited_s, stats, audits)
            accepted = await self._line.call(report, StepAccepted, patience=self._patience_s)
            self._resident(accepted.policy)
            self._events.emit("step_reported", step=batch.step, policy=str(accepted.policy))
            held_up = dict.fromkeys(held_up, 0.0)
            if accepted.publish:
                held_up = await self._begin_publish(life, accepted.policy)
            if accepted.stop:
                return

    async def _begin_publish(self, life: asyncio.TaskGroup, policy: Policy) -> dict[str, float]:
        """All that a publish takes of training: waiting for the one before, and a copy to host memory. Seconds."""
        asked_s = self._clock.monotonic()
        if self._publishing is not None:
            await self._publishing
        begun_s = self._clock.monotonic()
        # No name for the frozen copy here: it is as large as the model and must go when it is published.
        publish = self._publish(policy, await self._learner.freeze())
        self._publishing = life.create_task(publish, name=f"publish {policy}")
        del publish
        return {"publish_wait_s": begun_s - asked_s, "snapshot_s": self._clock.monotonic() - begun_s}

    async def _next_batch(self) -> BatchReply | None:
        """The batch of the step that comes next; None when the run ends."""
        while True:
            asked_s = self._clock.monotonic()
            request = RequestBatch(self._epoch, self._learner.step, MAX_WAIT_S)
            reply = await self._line.call(request, BatchReply, BatchWait)
            if isinstance(reply, BatchReply):
                return reply
            if isinstance(reply, BatchWait) and reply.stop:
                self._events.emit("told_to_stop", reason=reply.reason)
                return None
            await space_out(asked_s, self._clock, self._stop)

    # ---- durability and publishing -----------------------------------------------------------------------------

    async def _publish(self, policy: Policy, frozen: Frozen) -> None:
        """Consumes a frozen step; waits for disk and line; produces a durable checkpoint and a published version."""
        if self._publishes % self._options.checkpoint_every_publishes == 0:
            await self._make_durable(frozen)
        self._publishes += 1
        write = functools.partial(self._learner.write_snapshot, policy.incarnation, frozen)
        manifest, folder = await self._with_room(write)
        assert manifest.policy == policy, f"the snapshot is of {manifest.policy} and must be of {policy}"
        await self._send(manifest, folder)
        await self._learner.discard_snapshots(self._options.kept_snapshots)

    async def _make_durable(self, frozen: Frozen) -> None:
        if frozen.step > self._durable_step:
            await self._with_room(functools.partial(self._learner.save_checkpoint, frozen))
            self._durable_step = frozen.step
            await self._line.call(AckCheckpoint(self._epoch, frozen.step), Done, patience=self._patience_s)

    async def _with_room(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write, again and again while the disk is full: what was there before stays whole (field report E07)."""
        backoff = Backoff(self._jitter, first_s=1.0, most_s=60.0)
        while True:
            try:
                return await write()
            except DiskFull as error:
                if self._stop.called:
                    raise
                self._events.emit("disk_full", error=str(error))
                await self._stop.pause(backoff.next_s())

    async def _send(self, raw: Manifest, folder: Path) -> None:
        """Publish what changed since the last snapshot; the whole one where the coordinator cannot use that."""
        delta = await self._packed(raw, folder)
        if delta is not None and await self._upload(*delta):
            try:
                await self._make_visible(delta[0])
                return
            except IntegrityError as error:
                self._events.emit("delta_refused", policy=str(raw.policy), error=str(error))
        if not await self._upload(raw, folder / OBJECT_NAME):
            raise Refused(f"the coordinator must take {raw.policy} as a whole and did not; update the older program")
        await self._make_visible(raw)

    async def _make_visible(self, sent: Manifest) -> None:
        publish = PublishSnapshot(self._epoch, sent.policy, sent.object_root)
        await self._line.call(publish, Done, patience=self._patience_s)
        self._events.emit("published", policy=str(sent.policy), codec=sent.codec, bytes=sent.object_size)

    async def _packed(self, raw: Manifest, folder: Path) -> tuple[Manifest, Path] | None:
        try:
            return await self._with_room(functools.partial(self._packer.delta, raw, folder))
        except IntegrityError as error:  # The older snapshot is damaged; nothing is lost but bandwidth.
            self._events.emit("delta_failed", policy=str(raw.policy), error=str(error))
            return None

    async def _upload(self, manifest: Manifest, path: Path) -> bool:
        """Offer, upload what is missing. False when the coordinator wants the whole snapshot instead."""
        offer = OfferSnapshot(self._epoch, msgspec.json.encode(manifest))
        backoff = Backoff(self._jitter)
        while True:
            answer = await self._line.call(offer, SnapshotOffer, patience=self._patience_s)
            if answer.send_raw:
                return False
            if answer.received_bytes >= manifest.object_size:
                return True
            try:
                await self._sink.upload(manifest, path, answer.received_bytes)
            except TransportError as error:
                # What arrived is kept: the next offer says from where to go on.
                self._events.emit("upload_lost", policy=str(manifest.policy), error=str(error))
                await asyncio.sleep(backoff.next_s())

    async def _upload_asset(self, name: str, path: Path) -> None:
        backoff = Backoff(self._jitter)
        started_s = self._clock.monotonic()
        while True:
            try:
                return await self._sink.upload_asset(name, path)
            except TransportError as error:
                self._line.lose_patience(error, started_s)
                self._events.emit("upload_lost", asset=name, error=str(error))
                await asyncio.sleep(backoff.next_s())


def _nobody(_: Policy) -> None:
    """No engine shares the weights."""
