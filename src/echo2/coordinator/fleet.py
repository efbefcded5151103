"""The workers, the leases they hold, and how long leases take.

Invariant: a running lease belongs to exactly one known worker and ends exactly once: by a submission, by the worker
giving it back, or by the coordinator's own monotonic clock. No decision compares clocks of different machines.

Pure: time enters as a number.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable
from itertools import takewhile

import msgspec

from echo2.provisioning.rates import DeliveryRate, Estimate
from echo2.types import Policy

PATIENCE_GROWTH = 2.0
"""How much longer a silence may last once a worker came back from one that had counted as its end."""
OVERDUE_FACTOR = 3.0
"""A lease older than so many medians no longer counts as work that will arrive (PROTOCOL §3)."""
DURATIONS_KEPT = 64
"""Ended leases over which the median is taken."""
FIRST_OVERDUE_S = 60.0
"""Age at which a lease is overdue while no lease has ended yet."""


class RunningLease(msgspec.Struct):
    lease_id: str
    worker_id: str
    group_id: int
    attempt: int
    granted_s: float
    overdue: bool = False


class WorkerRecord(msgspec.Struct):
    worker_id: str
    name: str
    last_seen_s: float
    rate: DeliveryRate
    usd_per_h: float
    patience_s: float
    """Silence after which it counts as gone."""
    machine_id: str = ""
    """The pool's machine that it works on; empty for who joined by itself and is in no pool."""
    installed: Policy | None = None
    active: bool = True
    """a_i: heartbeats arrive."""
    draining: bool = False
    left: bool = False
    """It said so."""
    volunteers: bool = False
    """It joined by itself and is activated when it is needed."""
    waits: bool = False
    """It volunteers, and stands by."""
    state: str = ""
    rows_delivered: int = 0
    spooled_groups: int = 0
    lanes: int = 1
    """Its lease loops."""
    lanes_held: int = 0
    """Those that wait for work: their time says nothing about its rate."""
    held_until_s: float = 0.0
    """Up to which time that was counted."""

    def estimate(self, now: float) -> Estimate:
        """mu_i"""
        self.settle(now)
        return self.rate.estimate(now)

    def settle(self, now: float) -> None:
        """Count the time for which it has been held back."""
        if self.lanes_held:
            self.rate = self.rate.held((now - self.held_until_s) * self.lanes_held / self.lanes)
        self.held_until_s = now

    def hold(self, lanes: int, now: float) -> None:
        """So many more lease loops wait for work; fewer when negative."""
        self.settle(now)
        self.lanes_held += lanes


class Fleet:
    """Workers by id and running leases by id, oldest lease first."""

    def __init__(self, dead_after_s: float, lease_max_s: float, usd_per_h: float, lanes: int = 1) -> None:
        """lanes: lease loops of each worker."""
        self.dead_after_s = dead_after_s
        self.lease_max_s = lease_max_s
        self.usd_per_h = usd_per_h
        self.lanes = lanes
        self.workers: dict[str, WorkerRecord] = {}
        self.offered: dict[str, DeliveryRate] = {}
        """By machine of a pool that starts: what is expected of its worker before it has delivered."""
        self.installed: Counter[Policy | None] = Counter()
        """How many active workers run which policy."""
        self.leases: dict[str, RunningLease] = {}
        self._leases_of: dict[str, dict[str, RunningLease]] = {}
        """The same by worker."""
        self._durations: deque[float] = deque(maxlen=DURATIONS_KEPT)
        self._usual_s: float | None = None
        self._mean_s: float | None = None
        self._fresh: deque[RunningLease] = deque()
        """Leases not overdue yet, oldest first; ended ones linger until they reach the front."""

    def seen(
        self, worker_id: str, name: str, now: float, machine_id: str = "", usd_per_h: float | None = None
    ) -> WorkerRecord:
        """A request of this worker arrived. usd_per_h: None where its owner does not say."""
        worker = self.workers.get(worker_id)
        is_new = worker is None
        if worker is None:
            price = self.usd_per_h if usd_per_h is None else usd_per_h
            rate = self.offered.get(machine_id, DeliveryRate())
            worker = WorkerRecord(worker_id, name, now, rate, price, self.dead_after_s, machine_id, lanes=self.lanes)
            self.workers[worker_id] = worker
        if not worker.active:
            # It was not dead, only silent for long: taken for dead again and again, it would flap and its leases too.
            worker.patience_s = min(PATIENCE_GROWTH * worker.patience_s, max(self.dead_after_s, self.lease_max_s))
            worker.settle(now)
            worker.rate = worker.rate.held(now - worker.last_seen_s)
        worker.last_seen_s = now
        if not worker.active or is_new:
            self.installed[worker.installed] += 1
        worker.active, worker.left = True, False
        return worker

    def run(self, worker_id: str, policy: Policy | None) -> None:
        """The worker installed the policy; None when it started anew and runs nothing."""
        worker = self.workers[worker_id]
        if worker.active:
            self._count(worker, -1)
            self.installed[policy] += 1
        worker.installed = policy

    def retire(self, worker_id: str, *, left: bool) -> None:
        """The worker counts no more. left: it said so."""
        worker = self.workers[worker_id]
        if worker.active:
            self._count(worker, -1)
        worker.active, worker.left = False, left

    def _count(self, worker: WorkerRecord, by: int) -> None:
        self.installed[worker.installed] += by
        if not self.installed[worker.installed]:
            del self.installed[worker.installed]

    def on(self, machine_id: str) -> WorkerRecord | None:
        """The newest worker on a pool's machine."""
        found = [worker for worker in self.workers.values() if worker.machine_id == machine_id]
        return found[-1] if found else None

    def usual_lease_s(self) -> float | None:
        """T_gen: the time to finish a group, scoring and delivery included; None before one was."""
        return self._usual_s

    def mean_lease_s(self) -> float | None:
        """T_gen over groups, as Little's law needs it: so many times the pool's rate is under way.

        Overdue ones count as if they had just become so, for from then on nothing waits for them.
        """
        return self._mean_s

    def _took(self, seconds: float) -> None:
        """A lease brought rows after so long."""
        self._durations.append(seconds)
        self._usual_s = statistics.median(self._durations)
        limit = self.overdue_after_s()
        self._mean_s = statistics.fmean(min(taken, limit) for taken in self._durations)

    def restarted(self, worker_id: str) -> None:
        """It had been dead, or is new: its silence is judged as anybody's."""
        self.workers[worker_id].patience_s = self.dead_after_s

    def excuse(self, seconds: float, now: float) -> None:
        """This process itself stood still so long: nobody could be heard, so nobody was silent (H05)."""
        for worker in self.workers.values():
            worker.last_seen_s = min(now, worker.last_seen_s + seconds)

    def active(self) -> list[WorkerRecord]:
        return [worker for worker in self.workers.values() if worker.active]

    @property
    def active_count(self) -> int:
        return self.installed.total()

    def start(self, lease: RunningLease) -> None:
        self.leases[lease.lease_id] = lease
        self._leases_of.setdefault(lease.worker_id, {})[lease.lease_id] = lease
        self._fresh.append(lease)
        worker = self.workers.get(lease.worker_id)
        if worker is not None:
            worker.rate = worker.rate.given_work(lease.granted_s)

    def end(self, lease_id: str, now: float, delivered_rows: int | None) -> RunningLease | None:
        """The lease ended; with rows it also counts for the median and the worker's rate."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            del self._leases_of[lease.worker_id][lease_id]
        if lease is not None and delivered_rows is not None:
            self._took(now - lease.granted_s)
        return lease

    def delivered(self, worker_id: str, rows: int, now: float) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None and rows:
            worker.rows_delivered += rows
            worker.settle(now)
            worker.rate = worker.rate.delivered(now, rows)

    def leases_of(self, worker_id: str) -> list[RunningLease]:
        return list(self._leases_of.get(worker_id, {}).values())

    def overdue_after_s(self) -> float:
        usual_s = self.usual_lease_s()
        return FIRST_OVERDUE_S if usual_s is None else OVERDUE_FACTOR * usual_s

    def newly_overdue(self, now: float) -> list[RunningLease]:
        limit, found = self.overdue_after_s(), []
        while self._fresh and (self._fresh[0].lease_id not in self.leases or now - self._fresh[0].granted_s > limit):
            lease = self._fresh.popleft()
            if lease.lease_id in self.leases:
                lease.overdue = True
                found.append(lease)
        return found

    def lost(self, now: float) -> tuple[list[WorkerRecord], list[RunningLease]]:
        """Workers that just fell silent for too long, and leases that are lost with them or are too old."""
        silent = [w for w in self.workers.values() if w.active and now - w.last_seen_s > w.patience_s]
        for worker in silent:
            self.retire(worker.worker_id, left=False)
        lost = {x.lease_id: x for worker in silent for x in self.leases_of(worker.worker_id)}
        lost.update((x.lease_id, x) for x in self._too_old(now))
        return silent, list(lost.values())

    def _too_old(self, now: float) -> Iterable[RunningLease]:
        """They lie in the order in which they were granted."""
        return takewhile(lambda lease: now - lease.granted_s > self.lease_max_s, self.leases.values())

    def pool_rate_per_s(self, now: float) -> float:
        """Equation (4) over heartbeats."""
        return sum(worker.estimate(now).mean_per_s for worker in self.active())
