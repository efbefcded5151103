"""Answers to workers.

Invariant: a long poll is answered at the latest when its wait ends, and a lease whose client is gone is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

from echo2.broadcast.catalogue import cheapest_path
from echo2.coordinator.enrolment import check_tasks
from echo2.coordinator.hall import Hall
from echo2.transport import messages as m
from echo2.types import Policy, Verdict


class WorkerAnswers:
    def __init__(self, hall: Hall, task_fingerprints: Mapping[str, str]) -> None:
        self.hall = hall
        self._fingerprints = dict(task_fingerprints)

    async def hello(self, peer_id: str, request: m.Hello) -> m.Reply:
        check_tasks(self._fingerprints, request.task_fingerprints)
        self.hall.workers.hello(peer_id, request.held_leases, self.hall.clock.monotonic())
        self.hall.pump()
        return m.Welcome(
            run_id=self.hall.books.state.run_id,
            config_json=self.hall.config.model_dump_json(),
            assets=self.hall.books.assets,
            heartbeat_s=self.hall.config.coordinator.heartbeat_s,
            current=self.hall.books.state.current,
        )

    async def await_policy(self, peer_id: str, request: m.AwaitPolicy) -> m.Reply:
        deadline = self.hall.clock.monotonic() + self.hall.bounded(request.wait_s)
        self.hall.under_way(request.received)
        if self.hall.workers.note_installed(peer_id, request.installed, self.hall.clock.monotonic()):
            self._reconsider(peer_id, request.installed)
        while (path := self._path(request)) is None:
            if not await self.hall.news.wait(deadline - self.hall.clock.monotonic()):
                break
        gone = tuple(root for root in request.received if self.hall.shelf.signed(root) is None)
        return m.PolicyNews(self.hall.books.state.current, path or (), gone)

    def _path(self, request: m.AwaitPolicy) -> tuple[bytes, ...] | None:
        """Signed manifests that bring the worker to the current policy; None when that is no news, or cannot be."""
        current = self.hall.books.state.current
        if current is None or (request.after is not None and current <= request.after):
            return None
        entries = cheapest_path(self.hall.shelf.catalogue(), current, request.held, request.received)
        if entries is None:
            return None
        self.hall.under_way(entry.root for entry in entries)
        signed = [self.hall.shelf.signed(entry.root) for entry in entries]
        return tuple(manifest for manifest in signed if manifest is not None)

    async def certify(self, peer_id: str, request: m.CertifyRelay) -> m.Reply:
        return await self.hall.seed.certify(peer_id, request.public_key_pem)

    async def lease(self, peer_id: str, request: m.RequestLease) -> m.Reply:
        deadline_s = self.hall.clock.monotonic() + self.hall.bounded(request.wait_s)
        with self._held_back(peer_id):
            while (why := self.hall.workers.has_no_part(peer_id)) is not None:
                if not await self.hall.calls.wait(deadline_s - self.hall.clock.monotonic()):
                    return m.LeaseWait(why)
            return await self._queued(peer_id, request, deadline_s)

    @contextlib.contextmanager
    def _held_back(self, peer_id: str) -> Iterator[None]:
        """One of the worker's lease loops waits."""
        worker = self.hall.books.fleet.workers[peer_id]
        worker.hold(1, self.hall.clock.monotonic())
        try:
            yield
        finally:
            worker.hold(-1, self.hall.clock.monotonic())

    async def _queued(self, peer_id: str, request: m.RequestLease, deadline_s: float) -> m.Reply:
        """The gate's answer, once it is this worker's turn."""
        waiter = self.hall.queue.put(peer_id, request.installed)
        self.hall.pump()
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self.hall.clock.monotonic())):
                return await waiter
        except TimeoutError:
            # The grant may have come in the very moment in which the time ended.
            return waiter.result() if waiter.done() and not waiter.cancelled() else m.LeaseWait(self.hall.wait_reason)
        except asyncio.CancelledError:
            granted = waiter.result() if waiter.done() and not waiter.cancelled() else None
            if isinstance(granted, m.LeaseGrant):
                self.hall.workers.return_lease(granted, self.hall.clock.monotonic())  # Its client is gone.
            raise
        finally:
            self.hall.queue.forget(waiter)

    async def submit(self, peer_id: str, request: m.SubmitGroup) -> m.Reply:
        now = self.hall.clock.monotonic()
        verdicts = self.hall.workers.submit(peer_id, request, now)
        if Verdict.ACCEPTED in verdicts:
            self.hall.rows_at = now
        if self.hall.books.docket:
            self.hall.claims.notify()
        self.hall.pump()
        return m.SubmitVerdicts(tuple(verdicts))

    async def heartbeat(self, peer_id: str, request: m.Heartbeat) -> m.Reply:
        reply = self.hall.workers.heartbeat(peer_id, request, self.hall.clock.monotonic())
        self._reconsider(peer_id, request.installed)
        return reply

    def _reconsider(self, peer_id: str, installed: Policy | None) -> None:
        """What waits for a lease, where a worker may have installed something."""
        if installed is not None:
            self.hall.queue.send_back(peer_id, installed)
        self.hall.pump()
