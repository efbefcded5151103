"""What the live picture says of workers' relays."""

from __future__ import annotations

from desks import ONE, TWO, coordinator

from echo2.coordinator.relays import RelayStanding
from echo2.coordinator.status import run_status
from echo2.simulation.loop import run_virtual
from echo2.transport.messages import GetStatus, Heartbeat, Principal, Role, RunStatus


def test_each_worker_is_shown_with_its_relay_and_without_one_as_unknown() -> None:
    async def main() -> tuple[RunStatus, RunStatus]:
        made = await coordinator()
        for worker in (ONE, TWO):
            await made.handle(worker, Heartbeat(None, ()))
        plain = await made.handle(Principal(Role.OPERATOR, "people"), GetStatus())
        assert isinstance(plain, RunStatus)
        relays = {"one": RelayStanding(True, 30, 2), "stranger": RelayStanding(False, 1, 1)}
        return plain, run_status(made.books, None, made.clock.monotonic(), "", relays)

    plain, told = run_virtual(main())

    def relay(status: RunStatus) -> dict[str, tuple[bool | None, int, int]]:
        return {row["id"]: (row["reachable"], row["sent_bytes"], row["reparentings"]) for row in status.workers}

    assert relay(plain) == {"one": (None, 0, 0), "two": (None, 0, 0)}
    assert relay(told) == {"one": (True, 30, 2), "two": (None, 0, 0)}


def test_a_worker_on_a_pools_machine_costs_what_the_machine_does() -> None:
    async def main() -> RunStatus:
        made = await coordinator()
        for worker in (ONE, TWO):
            await made.handle(worker, Heartbeat(None, ()))
        now, books = made.clock.monotonic(), made.books
        books.fleet.workers["two"].machine_id = "vast-1"
        books.bill = books.bill.release("two", now).rent("one", 0.5, now).rent("vast-1", 0.3, now)
        return run_status(books, None, now + 7200.0, "", {})

    rows = {row["id"]: (row["usd_per_h"], round(row["cost_usd"], 9)) for row in run_virtual(main()).workers}
    assert rows == {"one": (0.5, 1.0), "two": (0.3, 0.6)}
