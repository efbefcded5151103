"""Workers that joined by themselves and stand by, as their pool sees them. Pure but for the books."""

from __future__ import annotations

from collections.abc import Sequence

from echo2.coordinator.fleet import WorkerRecord
from echo2.coordinator.hall import Hall
from echo2.provisioning.pools.standby import Volunteer


class FleetBenches:
    """Implements ``Benches``.

    Invariant: a worker is a volunteer from its first request on, whether it waits or works, as long as it is enrolled
    without a machine of another pool.
    """

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._fleet = hall.books.fleet

    def volunteers(self) -> Sequence[Volunteer]:
        return [self._volunteer(x) for x in self._fleet.workers.values() if x.volunteers]

    def call(self, worker_id: str, machine_id: str) -> None:
        worker = self._fleet.workers[worker_id]
        worker.waits, worker.machine_id = False, machine_id
        self._hall.calls.notify()

    def rest(self, worker_id: str) -> None:
        worker = self._fleet.workers[worker_id]
        worker.waits, worker.machine_id = True, ""

    def _volunteer(self, worker: WorkerRecord) -> Volunteer:
        measured = worker.estimate(self._hall.clock.monotonic()).mean_per_s if worker.rows_delivered else None
        is_heard = worker.active and not worker.draining
        return Volunteer(worker.worker_id, worker.usd_per_h, measured, is_heard, worker.machine_id)
