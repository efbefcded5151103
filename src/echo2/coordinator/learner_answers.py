"""Answers to the learner.

Invariant: a batch leaves only after it is durable, and a version becomes visible only after its snapshot is verified
and signed and the history says that it may.
"""

from __future__ import annotations

import msgspec

from echo2.broadcast.parse import parse_manifest
from echo2.coordinator.auditing import found_out
from echo2.coordinator.hall import Hall
from echo2.data.groups import Batch
from echo2.metrics import StepMetrics
from echo2.report.transcripts import choose
from echo2.transport import messages as m


class LearnerAnswers:
    def __init__(self, hall: Hall, last_metrics: StepMetrics | None) -> None:
        self.hall = hall
        self.last_metrics = last_metrics
        """Line of the newest step."""

    async def attach(self, peer_id: str, request: m.Attach) -> m.Reply:
        missing = await self.hall.shelf.missing_assets(request.assets)
        attached = self.hall.learner.attach(request, missing, self.hall.clock.monotonic())
        self.hall.pump()
        return attached

    async def batch(self, peer_id: str, request: m.RequestBatch) -> m.Reply:
        """Consumes a request; waits for P closed groups; unblocked by submissions and time; produces batch t."""
        start = self.hall.clock.monotonic()
        deadline = start + self.hall.bounded(request.wait_s)
        found: Batch | str = ""
        try:
            while isinstance(
                found := self.hall.learner.batch(request.epoch, request.step, self.hall.clock.monotonic()), str
            ):
                if self.hall.books.stop_reason:
                    return m.BatchWait(self.hall.books.stop_reason, stop=True)
                if not self.hall.books.learner_waits:
                    self.hall.books.learner_waits = True  # The gate now reaches S steps ahead.
                    self.hall.pump()
                    continue
                if not await self.hall.ready.wait(deadline - self.hall.clock.monotonic()):
                    return m.BatchWait(found)
        finally:
            if isinstance(found, Batch) or self.hall.books.stop_reason:
                self.hall.books.learner_waits = False
        self.hall.rows_at = self.hall.clock.monotonic()
        self.hall.pump()
        await self.hall.durable()
        records = await self.hall.store.payloads(found.rows)
        rows = tuple(
            m.BatchRow(group_id, index, msgspec.Raw(record))
            for (group_id, index, _), record in zip(found.rows, records, strict=True)
        )
        return m.BatchReply(found.step, found.digest, rows)

    async def report(self, peer_id: str, request: m.ReportStep) -> m.Reply:
        self.hall.books.scoreboard.traffic = self.hall.seed.traffic()
        accepted, line = self.hall.learner.report(request, self.hall.clock.monotonic(), self.hall.clock.wall())
        self.last_metrics = line or self.last_metrics
        if accepted.stop:
            self.hall.books.request_stop("the last step is trained")
        self.hall.pump()
        if line is not None:
            await self.hall.durable()
            await self._transcribe(request.step)
        for worker_id, reason in found_out(self.hall.books):
            await self.hall.set_aside(worker_id, reason)
        return accepted

    async def _transcribe(self, step: int) -> None:
        """Keep a few of the batch's trajectories readable, while their records are still there."""
        rows = self.hall.books.buffer.batch_rows(self.hall.books.buffer.batches[step])
        chosen = choose([row.reward or 0.0 for row in rows], self.hall.config.metrics.transcripts_per_step)
        self.hall.lines.transcribe(step, await self.hall.store.payloads([rows[index].key for index in chosen]))

    async def ack_checkpoint(self, peer_id: str, request: m.AckCheckpoint) -> m.Reply:
        self.hall.learner.ack_checkpoint(request.epoch, request.step)
        return m.Done()

    async def offer(self, peer_id: str, request: m.OfferSnapshot) -> m.Reply:
        manifest = parse_manifest(request.manifest)
        self.hall.learner.check_offer(request.epoch, manifest)
        received = await self.hall.shelf.offer(manifest)
        return m.SnapshotOffer(0, send_raw=True) if received is None else m.SnapshotOffer(received)

    async def publish(self, peer_id: str, request: m.PublishSnapshot) -> m.Reply:
        self.hall.learner.check_publish(request.epoch, request.policy)
        published = await self.hall.shelf.finish(request.policy, request.root)
        self.hall.learner.check_publish(request.epoch, request.policy)  # A newer learner may have attached meanwhile.
        self.hall.learner.published(published, self.hall.clock.monotonic())
        await self.hall.durable()
        self.hall.rows_at = self.hall.clock.monotonic()
        self.hall.pump()
        await self.hall.spread(published.entry.root)
        await self.hall.prune()
        return m.Done()
