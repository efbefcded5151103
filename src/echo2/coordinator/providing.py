"""The run as the activation controller sees it: workers, times and money from the books.

Invariant: mu_i is what reached the buffer, a_i what the coordinator heard; of a machine the pool says only that it is
there and what it costs. A machine is billed from the order that stood until it is gone, once, whoever works on it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence

import msgspec

from echo2.config.root import Config
from echo2.coordinator.fleet import OVERDUE_FACTOR, WorkerRecord
from echo2.coordinator.hall import Hall
from echo2.coordinator.wakeup import Wakeup
from echo2.provisioning.controller import State
from echo2.provisioning.drive import Past
from echo2.provisioning.ledger import Rental
from echo2.provisioning.observation import Listing, Machine, Observation, Phase
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.pool import Handle
from echo2.provisioning.rates import ESTIMATED_DELIVERIES, PRIOR_DELIVERIES, DeliveryRate, Estimate
from echo2.provisioning.rules import Rules

RECALLED_DELIVERIES = 5.0
"""Weight of what a worker delivered in an earlier life of the coordinator: enough to count as measured, and little
enough that one which stopped meanwhile is found out by its silence."""
_GONE = (Phase.LOST, Phase.FAILED)


class Memory(msgspec.Struct, frozen=True):
    """What outlives the coordinator's process."""

    saved_s: float
    """On the clock of that life."""
    saved_wall: float
    past: Past
    machines: dict[str, Rental]
    """What is paid for."""
    rates: dict[str, Estimate]
    """By machine, what its worker delivers."""


class Provided:
    """Implements ``drive.Run``."""

    def __init__(self, hall: Hall, done: asyncio.Event) -> None:
        self._hall = hall
        self._books = hall.books
        self._done = done
        self._past = Past()
        self._billed: set[str] = set()
        self._offers: dict[str, Offer] = {}
        """All that was ever offered, by name."""
        self._recalled: dict[str, Rental] = {}
        """What an earlier life paid for, from when it last counted, until the pools say whether it is there."""
        self._ordered_s: dict[str, float] = {}
        """By machine that is not billed yet."""
        self._rates: dict[str, Estimate] = {}
        """By machine of an earlier life, what its worker delivered."""
        self.news = Wakeup()
        """A worker went away, or the run is over."""

    @property
    def over(self) -> bool:
        return self._done.is_set()

    @property
    def group_s(self) -> float:
        usual_s = self._books.fleet.usual_lease_s()
        return 0.0 if usual_s is None else min(OVERDUE_FACTOR * usual_s, self._books.config.coordinator.lease_max_s)

    def observe(self, handles: Sequence[Handle], listings: Sequence[Listing]) -> Observation:
        now, books = self._hall.clock.monotonic(), self._books
        self._offers |= {listing.offer.name: listing.offer for listing in listings}
        handles = [self._priced(handle) for handle in handles]
        self._bill(handles, now)
        books.account(now)
        scoreboard = books.scoreboard
        return Observation(
            now_s=now,
            t_train_s=scoreboard.profiled_t_train_s,
            t_bcast_s=scoreboard.usual_t_bcast_s,
            t_gen_s=books.fleet.usual_lease_s(),
            machines=(*(handle.machine() for handle in handles), *self._workers(now)),
            listings=tuple(listings),
            spent_usd=books.state.cost_usd,
            learner_usd_per_h=books.config.provisioning.learner_usd_per_h,
            received_gb_per_h=books.scoreboard.received_gb_per_h,
            ending=bool(books.stop_reason),
        )

    def remember(self, past: Past) -> None:
        clock, books, self._past = self._hall.clock, self._books, past
        now = clock.monotonic()
        machines = {name: books.bill.rentals[name] for name in sorted(self._billed)}
        memory = Memory(now, clock.wall(), past, machines, self._measured(now))
        books.state.provisioning = msgspec.msgpack.encode(memory)
        starts = past.state.roster.starts
        self._ordered_s = {name: self._ordered_s.get(name, now) for name in starts if name not in self._billed}
        self._expect(past.state)

    def recall(self) -> Past | None:
        """Of an earlier life: what it knew, on this one's clock."""
        books, now = self._books, self._hall.clock.monotonic()
        if not books.state.provisioning:
            return None
        memory = msgspec.msgpack.decode(books.state.provisioning, type=Memory)
        down_s = max(0.0, self._hall.clock.wall() - memory.saved_wall)
        shift_s = now - down_s - memory.saved_s
        self._recalled = {
            name: Rental(rental.usd_per_h, books.counted_s, rental.paid_until_s + shift_s)
            for name, rental in memory.machines.items()
        }
        self._rates = memory.rates
        for worker in books.fleet.workers.values():
            if worker.machine_id in self._rates:  # it was there before this look, with a lease that goes on
                prior = self._recalled_rate(worker.machine_id)
                worker.rate = msgspec.structs.replace(prior, opened_s=worker.rate.opened_s, held_s=worker.rate.held_s)
        handles = {
            pool: tuple(msgspec.structs.replace(h, paid_until_s=h.paid_until_s + shift_s) for h in of_pool)
            for pool, of_pool in memory.past.handles.items()
        }
        return Past(memory.past.state.carried_over(memory.saved_s, now, down_s), handles)

    async def drain(self, machine_id: str) -> None:
        worker = self._books.fleet.on(machine_id)
        if worker is None:
            return
        worker.waits, worker.draining = worker.volunteers, not worker.volunteers
        self._books.publishing.loses(worker.worker_id)
        self._books.note_installs(self._hall.clock.monotonic())
        self._hall.queue.turn_away(worker.worker_id, "its machine is not needed any more")
        if worker.volunteers:
            while worker.active and self._books.fleet.leases_of(worker.worker_id):
                await self.news.wait(self._books.config.coordinator.heartbeat_s)
            return
        while worker.active:
            await self.news.wait(self._books.config.coordinator.heartbeat_s)

    def returned(self, machine_id: str) -> None:
        now = self._hall.clock.monotonic()
        self._books.bill = self._books.bill.release(machine_id, now)
        self._billed.discard(machine_id)
        worker = self._books.fleet.on(machine_id)
        if worker is not None and worker.active:
            # Nobody is there any more: what it held is handed out again now, not after a silence.
            self._hall.workers.leave(worker.worker_id, now)
            self._hall.pump()
        self._books.account(now)
        there = {pool: tuple(h for h in of if h.machine_id != machine_id) for pool, of in self._past.handles.items()}
        self.remember(Past(self._past.state, there))

    def end(self, reason: str) -> None:
        self._books.request_stop(reason)
        self._hall.pump()

    async def wait(self, timeout_s: float) -> None:
        await self.news.wait(timeout_s)

    # ---- workers and machines -----------------------------------------------------------------------------------

    def _workers(self, now: float) -> Iterable[Machine]:
        for worker in self._books.fleet.workers.values():
            if worker.machine_id or not worker.volunteers:
                yield _machine(worker, now)

    def _expect(self, state: State) -> None:
        """What a machine's offer says is what is believed of its worker at first."""
        rows = float(self._books.config.rollout.group_size)
        self._books.fleet.offered = {
            name: DeliveryRate(
                prior_per_s=start.expected_per_s,
                prior_deliveries=ESTIMATED_DELIVERIES if self._is_estimated(start.offer) else PRIOR_DELIVERIES,
                rows_per_delivery=rows,
            )
            for name, start in state.roster.starts.items()
        }
        self._books.fleet.offered |= {name: self._recalled_rate(name) for name in self._rates}

    def _measured(self, now: float) -> dict[str, Estimate]:
        """Of workers on machines that have delivered, and those of an earlier life that were not heard yet."""
        workers = [worker for worker in self._books.fleet.workers.values() if worker.machine_id]
        heard = {worker.machine_id for worker in workers}
        unheard = {name: rate for name, rate in self._rates.items() if name in self._billed and name not in heard}
        rates = {worker.machine_id: worker.estimate(now) for worker in workers if worker.active}
        return {**unheard, **{name: rate for name, rate in rates.items() if 0 < rate.deliveries < math.inf}}

    def _recalled_rate(self, machine_id: str) -> DeliveryRate:
        """A restart of the coordinator makes no worker slower: what it delivered is what is believed of it."""
        known = self._rates[machine_id]
        return DeliveryRate(
            prior_per_s=known.mean_per_s,
            prior_deliveries=min(known.deliveries, RECALLED_DELIVERIES),
            rows_per_delivery=float(self._books.config.rollout.group_size),
        )

    def _is_estimated(self, offer: str) -> bool:
        """Nobody measured its throughput."""
        return offer in self._offers and self._offers[offer].estimated

    def _priced(self, handle: Handle) -> Handle:
        """With the price of its traffic, which pools do not know."""
        offer = self._offers.get(handle.offer)
        if offer is None or not offer.traffic_usd_per_gb:
            return handle
        traffic_usd_per_h = offer.traffic_usd_per_gb * self._books.scoreboard.received_gb_per_h
        return msgspec.structs.replace(handle, usd_per_h=handle.usd_per_h + traffic_usd_per_h)

    def _bill(self, handles: Sequence[Handle], now: float) -> None:
        books = self._books
        present = {handle.machine_id: handle for handle in handles if handle.phase not in _GONE}
        for name, rental in self._recalled.items():
            # One that is not there any more was given back or ended by itself: nobody knows when.
            rented = books.bill.rent(name, rental.usd_per_h, rental.since_s, rental.paid_until_s - rental.since_s)
            books.bill = rented if name in present else rented.release(name, rental.since_s)
            self._billed.add(name)
        self._recalled = {}
        for name, handle in present.items():
            running = books.bill.rentals.get(name)
            if running is None or running.usd_per_h != handle.usd_per_h:
                since_s = now if running is not None else self._ordered_s.pop(name, now)
                books.bill = books.bill.rent(name, handle.usd_per_h, since_s, max(0.0, handle.paid_until_s - since_s))
        taken = {handle.machine_id for handle in handles if handle.phase in _GONE}
        for name in sorted(self._billed - present.keys()):
            books.bill = books.bill.lose(name, now) if name in taken else books.bill.release(name, now)
        self._billed = set(present)


def _machine(worker: WorkerRecord, now: float) -> Machine:
    phase = Phase.LOST if worker.left else Phase.DRAINING if worker.draining else Phase.ACTIVE
    return Machine(
        machine_id=worker.machine_id or worker.worker_id,
        phase=phase,
        usd_per_h=0.0 if worker.machine_id else worker.usd_per_h,
        rate=worker.estimate(now),
        available=worker.active,
        delivered=worker.rows_delivered > 0,
    )


def rules_of(config: Config) -> Rules:
    """Raises UserError for the policy ``exact`` without SciPy."""
    section = config.provisioning
    return Rules(
        rollouts_per_step=config.rollout.rollouts_per_step,
        staleness_budget=config.staleness_budget,
        publish_period=config.publish_period,
        gamma=section.gamma,
        rule=section.rule,
        policy=section.policy,
        seed=config.run.seed,
        period_s=section.period_s,
        sustain=section.sustain,
        cool_down_s=section.cool_down_s,
        start_s=section.start_s,
        max_price_age_s=section.max_price_age_s,
        first_machines=section.first_machines,
        budget_usd=section.budget_usd,
    )
