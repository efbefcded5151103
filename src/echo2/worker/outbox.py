"""How finished groups reach the coordinator.

Invariant: a group is in the spool before it is on the wire, and leaves it only for an answer; a lost line, a dead
process or a drain that ran out of patience loses none.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from echo2.errors import DiskFull, Refused, Starved, Unauthorised
from echo2.ports import EventLog, Spool
from echo2.transport.messages import SubmitGroup, SubmitVerdicts
from echo2.transport.patience import Line, Recall

DRAIN_PATIENCE_S = 60.0
"""How long a draining worker tries to reach a silent coordinator before it leaves its groups in the spool."""


class Outbox:
    def __init__(self, line: Line, spool: Spool, drain: Recall, events: EventLog, orphan_after_s: float) -> None:
        self._line = line
        self._spool = spool
        self._drain = drain
        self._events = events
        self._orphan_after_s = orphan_after_s
        self._backlog: dict[str, SubmitGroup] = {}

    @property
    def backlog(self) -> tuple[str, ...]:
        """Leases whose groups an earlier life finished and this one has not submitted yet."""
        return tuple(self._backlog)

    async def recover(self) -> None:
        """Find what an earlier life left."""
        for lease_id, payload in await self._spool.pending():
            try:
                self._backlog[lease_id] = msgspec.msgpack.decode(payload, type=SubmitGroup)
            except msgspec.DecodeError as error:
                self._events.emit("spool_unreadable", lease=lease_id, error=str(error))
                await self._spool.remove(lease_id)

    async def run(self) -> None:
        """Consumes the backlog; waits for verdicts; unblocked by the coordinator; produces an empty spool."""
        for lease_id, group in list(self._backlog.items()):
            await self._submit(group)
            del self._backlog[lease_id]

    async def send(self, group: SubmitGroup) -> None:
        """Keep, then submit until answered. Raises Unauthorised, Starved."""
        try:
            await self._spool.put(group.lease_id, msgspec.msgpack.encode(group))
        except (OSError, DiskFull) as error:
            # A full disk takes the safety net away, not the group: it still goes out from memory.
            self._events.emit("spool_failed", lease=group.lease_id, error=str(error))
        await self._submit(group)

    async def _submit(self, group: SubmitGroup) -> None:
        try:
            reply = await self._line.call(group, SubmitVerdicts, patience=self._patience_s)
        except Unauthorised:
            raise
        except Refused as error:
            self._events.emit("submission_refused", lease=group.lease_id, error=str(error))
        except Starved:
            if not self._drain.called:
                raise
            self._events.emit("left_in_spool", lease=group.lease_id)
            return
        else:
            judged = Counter(verdict.value for verdict in reply.verdicts)
            told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(judged.items()))
            self._events.emit("submitted", lease=group.lease_id, verdicts=told)
        await self._spool.remove(group.lease_id)

    def _patience_s(self) -> float:
        return DRAIN_PATIENCE_S if self._drain.called else self._orphan_after_s
