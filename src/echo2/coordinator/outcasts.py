"""Workers that were set aside: the one place where that is done, remembered and told.

Invariant: whoever is in here is refused whatever it asks, in this life of the coordinator and in later ones, with the
reason; none of its rows that a batch does not hold yet is trained on. It is not a defence against a machine that enrols
again under a new name: for that, take the join string back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from echo2.coordinator.operations import Outcast, OutcastPut
from echo2.errors import SetAside

if TYPE_CHECKING:
    from echo2.coordinator.worker_desk import WorkerDesk


class Outcasts:
    def __init__(self, known: Iterable[Outcast]) -> None:
        self._known = {outcast.worker_id: outcast for outcast in known}

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, outcast: Outcast) -> None:
        self._known[outcast.worker_id] = outcast

    def check(self, worker_id: str) -> None:
        """Raises SetAside."""
        outcast = self._known.get(worker_id)
        if outcast is not None:
            raise SetAside(
                f"this run takes no more work of worker {outcast.name}: {outcast.reason}; when the cause is removed, "
                "join again with a folder of its own"
            )

    def all(self) -> tuple[Outcast, ...]:
        """In the order in which they were set aside."""
        return tuple(sorted(self._known.values(), key=lambda outcast: (outcast.wall_time, outcast.worker_id)))

    def told(self) -> dict[str, str]:
        """By worker id: its name, and why."""
        return {outcast.worker_id: f"{outcast.name}: {outcast.reason}" for outcast in self.all()}


def set_aside(desk: WorkerDesk, worker_id: str, reason: str, now: float, wall: float) -> None:
    """Take no more of this worker's work. Its leases, and what it delivered that no batch holds, go to others."""
    books, worker = desk.books, desk.fleet.workers.get(worker_id)
    outcast = Outcast(worker_id, worker_id if worker is None else worker.name, reason, wall)
    books.outcasts.add(outcast)
    books.record(OutcastPut(outcast))
    books.docket.forget_worker(worker_id)
    for lease in desk.fleet.leases_of(worker_id):
        desk.lose(lease, "its worker was set aside", now)
    refused = desk.buffer.distrust(worker_id)
    if books.evaluation is not None:
        books.evaluation.distrust(worker_id)
    desk.events.emit("worker_set_aside", worker=worker_id, name=outcast.name, reason=reason, rows=refused)
    if worker is not None and worker.active:
        desk.fleet.retire(worker_id, left=False)
        desk.dismiss(worker, now)
