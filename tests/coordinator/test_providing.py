"""The run as the controller of its pools sees it."""

from __future__ import annotations

import asyncio

import desks
import msgspec
import pytest

from echo2.broadcast.catalogue import Entry
from echo2.broadcast.shelf import Published
from echo2.coordinator.program import Coordinator
from echo2.coordinator.providing import Provided, rules_of
from echo2.provisioning.controller import State, decide
from echo2.provisioning.drive import Past
from echo2.provisioning.observation import Machine, Phase, listed, merged
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.pool import Handle
from echo2.provisioning.roster import Roster, Start
from echo2.simulation.clock import VirtualClock
from echo2.simulation.loop import run_virtual
from echo2.simulation.memory import MemoryStore
from echo2.transport.join import JoinString
from echo2.transport.messages import PROTOCOL_VERSION, Enrol, Heartbeat, LeaseWait, Principal, RequestLease
from echo2.types import SnapshotKind
from echo2.version import VERSION

H = 3600.0
OFFER = Offer(name="rented", gpu="any", count=4, usd_per_h=3.0, rollouts_per_s=2.0)


def handle(phase: Phase = Phase.ACTIVE, paid_until_s: float = 0.0, usd_per_h: float = 3.0) -> Handle:
    return Handle(machine_id="rented-1", offer="rented", phase=phase, usd_per_h=usd_per_h, paid_until_s=paid_until_s)


async def provided(clock: VirtualClock | None = None, store: MemoryStore | None = None) -> tuple[Coordinator, Provided]:
    made = await desks.coordinator(store, clock, pools=[{"kind": "standby"}])  # type: ignore[arg-type]
    return made, Provided(made.hall, made.done)


async def joined(made: Coordinator, machine_id: str) -> Principal:
    """The worker of a machine, enrolled by its own invitation."""
    made.invitations.open(JoinString("here", 1, False, "unused"))
    token = JoinString.parse(await made.invitations(machine_id)).token
    enrolled = await made.enrol(Enrol(token, "whatever it claims", PROTOCOL_VERSION, VERSION))
    worker = Principal(enrolled.role, enrolled.peer_id)
    await made.handle(worker, Heartbeat(None, ()))
    return worker


def seen(run: Provided, *handles: Handle) -> dict[str, Machine]:
    found = run.observe(handles, [listed(OFFER, 0.0)])
    return {machine.machine_id: machine for machine in merged(found.machines)}


def test_a_machine_is_billed_from_its_order_whoever_works_on_it() -> None:
    async def main() -> None:
        made, run = await provided()
        seen(run, handle(Phase.STARTING))
        await asyncio.sleep(1 * H)
        await joined(made, "rented-1")
        await asyncio.sleep(1 * H)
        seen(run, handle())
        assert made.books.state.cost_usd == pytest.approx(6.0)
        assert made.books.bill.usd_per_h == 3.0

    run_virtual(main())


def test_a_machine_that_was_taken_away_costs_nothing_more_and_one_given_back_its_minimum() -> None:
    async def main() -> None:
        made, run = await provided()
        seen(run, handle(paid_until_s=10 * H))
        await asyncio.sleep(1 * H)
        seen(run, handle(Phase.LOST, paid_until_s=10 * H))
        assert made.books.state.cost_usd == pytest.approx(3.0)
        seen(run)
        assert made.books.state.cost_usd == pytest.approx(3.0)

        seen(run, msgspec.structs.replace(handle(paid_until_s=10 * H), machine_id="rented-2"))
        seen(run)
        assert made.books.state.cost_usd == pytest.approx(3.0 + 9 * 3.0)

    run_virtual(main())


def test_a_price_that_changes_counts_from_then_on() -> None:
    async def main() -> None:
        made, run = await provided()
        seen(run, handle())
        await asyncio.sleep(1 * H)
        seen(run, handle(usd_per_h=5.0))
        await asyncio.sleep(1 * H)
        seen(run, handle(usd_per_h=5.0))
        assert made.books.state.cost_usd == pytest.approx(8.0)

    run_virtual(main())


def test_a_worker_and_its_machine_are_one_and_what_the_offer_says_is_believed_at_first() -> None:
    async def main() -> None:
        made, run = await provided()
        assert seen(run, handle())["rented-1"].phase is Phase.STARTING
        ordered = Start("rented", 2.0, 3.0, start_by_s=600.0, paid_until_s=0.0)
        run.remember(Past(State(roster=Roster(starts={"rented-1": ordered}))))
        worker = await joined(made, "rented-1")
        machine = seen(run, handle())["rented-1"]
        assert (machine.phase, machine.offer, machine.available) == (Phase.ACTIVE, "rented", True)
        assert machine.rate.mean_per_s == pytest.approx(2.0)
        assert made.registry.peer(worker.peer_id).name == "rented-1", "not what it claims"
        assert made.books.fleet.workers[worker.peer_id].waits is False, "no volunteer"

    run_virtual(main())


def test_an_invitation_is_good_for_one_worker() -> None:
    async def main() -> None:
        made, _ = await provided()
        made.invitations.open(JoinString("here", 7, False, "unused"))
        join = JoinString.parse(await made.invitations("rented-1"))
        assert (join.address, join.port) == ("here", 7)
        await made.enrol(Enrol(join.token, "one", PROTOCOL_VERSION, VERSION))
        with pytest.raises(Exception, match="used up"):
            await made.enrol(Enrol(join.token, "two", PROTOCOL_VERSION, VERSION))

    run_virtual(main())


def test_a_released_worker_finishes_what_it_has_and_those_behind_it_do_not_wait() -> None:
    async def main() -> None:
        made, run = await provided()
        await desks.attach(made)
        worker, other = await joined(made, "rented-1"), await joined(made, "rented-2")
        grant = await desks.leased(made, worker)
        drained = asyncio.create_task(run.drain("rented-1"))
        await asyncio.sleep(1.0)
        assert not drained.done()
        await made.handle(worker, Heartbeat(desks.V0, (grant.lease_id,)))
        refused = asyncio.create_task(made.handle(worker, RequestLease(desks.V0, 20.0)))
        await desks.leased(made, other)
        reply = await refused
        assert isinstance(reply, LeaseWait)
        assert "given back" in reply.reason
        await asyncio.sleep(300.0)  # it falls silent, as one that left does
        made.hall.workers.tick(made.clock.monotonic())
        await asyncio.wait_for(drained, 10.0)

    run_virtual(main())


def test_what_a_stopped_machine_held_is_handed_out_again_at_once() -> None:
    async def main() -> None:
        made, run = await provided()
        await desks.attach(made)
        worker, other = await joined(made, "rented-1"), await joined(made, "rented-2")
        grant = await desks.leased(made, worker)
        run.returned("rented-1")
        again = await desks.leased(made, other)
        assert (again.group_id, again.lease_id != grant.lease_id) == (grant.group_id, True)

    run_virtual(main())


def test_what_machines_cost_while_the_coordinator_was_away_is_owed() -> None:
    async def main() -> None:
        store = MemoryStore(0.0)
        made, run = await provided(store=store)
        seen(run, handle(paid_until_s=20 * H))
        await asyncio.sleep(1 * H)
        seen(run, handle(paid_until_s=20 * H))
        run.remember(Past())
        await asyncio.sleep(0.5 * H)
        made.books.account(made.clock.monotonic())
        await made.hall.durable()
        assert made.books.state.cost_usd == pytest.approx(4.5)
        await asyncio.sleep(2 * H)
        again, resumed = await provided(store=store)
        assert resumed.recall() is not None
        seen(resumed, handle(paid_until_s=20 * H))
        assert again.books.state.cost_usd == pytest.approx(4.5 + 6.0)
        seen(resumed)
        assert again.books.state.cost_usd == pytest.approx(60.0), "the minimum runs from the first life"

    run_virtual(main())


def test_traffic_is_paid_for_too_at_the_rate_that_the_run_measures() -> None:
    dear = msgspec.structs.replace(OFFER, traffic_usd_per_gb=0.5)

    async def main() -> None:
        made, run = await provided()
        run.observe([handle()], [listed(dear, 0.0)])
        board = made.books.scoreboard
        board.trained(1800.0)
        board.published(Published(Entry(desks.V0, SnapshotKind.ANCHOR, None, "r", 2_000_000_000, "d"), raw_bytes=4))
        found = run.observe([handle()], [listed(dear, 0.0)])
        assert found.received_gb_per_h == pytest.approx(2.0)  # one in two steps of half an hour
        assert found.machines[0].usd_per_h == pytest.approx(3.0 + 1.0)
        await asyncio.sleep(1 * H)
        run.observe([handle()], [])
        assert made.books.state.cost_usd == pytest.approx(4.0)


def test_a_machine_is_billed_from_the_order_to_the_moment_of_its_return_and_not_from_look_to_look() -> None:
    async def main() -> None:
        made, run = await provided()
        seen(run)
        run.remember(Past(State(roster=Roster(starts={"rented-1": Start("rented", 2.0, 3.0, 600.0, 0.0)}))))
        await asyncio.sleep(60.0)
        seen(run, handle())
        await asyncio.sleep(30.0)
        run.returned("rented-1")
        await asyncio.sleep(30.0)
        seen(run)
        assert made.books.state.cost_usd == pytest.approx(3.0 * 90 / H)

    run_virtual(main())


def test_what_each_machine_cost_is_known_and_a_restart_keeps_it() -> None:
    async def main() -> None:
        made, run = await provided()
        seen(run, handle())
        await asyncio.sleep(1 * H)
        seen(run, handle(Phase.LOST))
        costs = made.books.costs_usd(made.clock.monotonic())
        assert costs == {"rented-1": pytest.approx(3.0)}
        made.books.state.cost_usd = 3.5
        made.books.resume_bill(costs)
        assert made.books.costs_usd(made.clock.monotonic()) == {"before a restart": 0.5, "rented-1": pytest.approx(3.0)}
        made.books.account(made.clock.monotonic())
        assert made.books.state.cost_usd == pytest.approx(3.5)


def test_a_machine_that_is_gone_after_a_restart_was_not_paid_for_all_that_time() -> None:
    """Its coordinator gave it back while it ended, and could not write that down any more."""

    async def main() -> None:
        store = MemoryStore(0.0)
        made, run = await provided(store=store)
        seen(run, handle())
        await asyncio.sleep(1 * H)
        seen(run, handle())
        run.remember(Past())
        await made.hall.durable()
        await asyncio.sleep(48 * H)
        again, resumed = await provided(store=store)
        resumed.recall()
        seen(resumed)
        assert again.books.state.cost_usd == pytest.approx(3.0)

    run_virtual(main())


def test_a_run_that_ends_says_so_and_not_that_there_are_no_offers() -> None:
    async def main() -> None:
        made, run = await provided()
        made.books.request_stop("asked to")
        found = run.observe([], [listed(OFFER, 0.0)])
        _, (decision,) = decide(State(), found, rules_of(made.config))
        assert "the run is ending" in decision.reason


def test_a_worker_whose_lease_outlives_the_coordinator_stays_the_worker_of_its_machine() -> None:
    async def main() -> None:
        store = MemoryStore(0.0)
        made, run = await provided(store=store)
        await desks.attach(made)
        worker = await joined(made, "rented-1")
        for _ in range(6):
            await asyncio.sleep(1.0)
            await desks.generate(made, 1, worker)
        rate = seen(run, handle())["rented-1"].rate
        await desks.leased(made, worker)
        run.remember(Past(handles={"rented": (handle(),)}))
        await made.hall.durable()
        again, resumed = await provided(store=store)
        past = resumed.recall()
        assert past is not None
        assert [h.machine_id for h in past.handles["rented"]] == ["rented-1"]
        machine = seen(resumed, handle())["rented-1"]
        assert (machine.phase, machine.offer) == (Phase.ACTIVE, "rented")
        assert machine.rate.mean_per_s == pytest.approx(rate.mean_per_s), "no slower for that"
        assert [w.machine_id for w in again.books.fleet.workers.values()] == ["rented-1"]

    run_virtual(main())


def test_a_volunteer_whose_lease_outlives_the_coordinator_stays_a_volunteer() -> None:
    async def main() -> None:
        store = MemoryStore(0.0)
        made, _ = await provided(store=store)
        await desks.attach(made)
        await made.handle(desks.ONE, Heartbeat(desks.V0, ()))
        made.books.fleet.workers["one"].waits = False
        await desks.leased(made, desks.ONE)
        again, _ = await provided(store=store)
        await again.handle(desks.ONE, Heartbeat(desks.V0, ()))
        worker = again.books.fleet.workers["one"]
        assert (worker.volunteers, worker.waits) == (True, True)

    run_virtual(main())


def test_a_learner_that_outlives_the_coordinator_is_paid_for_meanwhile() -> None:
    async def main() -> None:
        store, price = MemoryStore(0.0), {"provisioning": {"learner_usd_per_h": 2.0}}
        made = await desks.coordinator(store, **price)
        epoch = await desks.attach(made)
        await asyncio.sleep(1 * H)
        made.books.account(made.clock.monotonic())
        await made.hall.durable()
        await asyncio.sleep(0.5 * H)
        again = await desks.coordinator(store, **price)
        again.hall.learner.heard(epoch, again.clock.monotonic())
        again.books.account(again.clock.monotonic())
        assert again.books.state.cost_usd == pytest.approx(3.0)

        other = await desks.coordinator(store, **price)
        await desks.attach(other)  # a new one, which was not there
        other.books.account(other.clock.monotonic())
        assert other.books.state.cost_usd == pytest.approx(2.0)

    run_virtual(main())
