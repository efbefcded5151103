from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from echo2.errors import Refused
from echo2.provisioning.observation import Phase
from echo2.provisioning.pools.standby import StandbyPool, Volunteer


class Bench:
    def __init__(self, *volunteers: Volunteer) -> None:
        self.there = {volunteer.worker_id: volunteer for volunteer in volunteers}

    def volunteers(self) -> Sequence[Volunteer]:
        return list(self.there.values())

    def call(self, worker_id: str, machine_id: str) -> None:
        self.there[worker_id] = msgspec.structs.replace(self.there[worker_id], machine_id=machine_id)

    def rest(self, worker_id: str) -> None:
        self.call(worker_id, "")


class Clock:
    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return 0.0


def pool(*volunteers: Volunteer) -> tuple[StandbyPool, Bench]:
    bench = Bench(*volunteers)
    return StandbyPool(bench, 0.25, Clock()), bench


async def test_each_volunteer_that_is_heard_is_an_offer_of_one() -> None:
    made, _ = pool(Volunteer("w1", 0.4, None, True), Volunteer("w2", 0.0, 2.0, True), Volunteer("w3", 0.1, 1.0, False))
    offers = {listing.offer.name: listing.offer for listing in await made.listings()}
    assert offers.keys() == {"standby-w1", "standby-w2"}
    assert (offers["standby-w1"].rollouts_per_s, offers["standby-w1"].estimated) == (0.25, True)
    assert (offers["standby-w2"].rollouts_per_s, offers["standby-w2"].estimated) == (2.0, False)
    assert all(offer.count == 1 and offer.usd_per_h > 0 for offer in offers.values())


async def test_a_volunteer_works_from_its_start_to_its_stop_and_then_waits_again() -> None:
    made, bench = pool(Volunteer("w1", 0.4, None, True))
    assert await made.machines() == []
    handle = await made.start("standby-w1-7", "standby-w1")
    assert (handle.machine_id, handle.phase, handle.usd_per_h) == ("standby-w1-7", Phase.ACTIVE, 0.4)
    assert await made.machines() == [handle] == [await made.start("standby-w1-7", "standby-w1")]
    await made.stop("standby-w1-7")
    assert bench.there["w1"].machine_id == "" and await made.machines() == []


async def test_a_volunteer_that_went_away_is_refused_or_lost() -> None:
    made, bench = pool(Volunteer("w1", 0.4, None, True))
    await made.start("m", "standby-w1")
    bench.there["w1"] = msgspec.structs.replace(bench.there["w1"], is_heard=False)
    assert [handle.phase for handle in await made.machines()] == [Phase.LOST]
    await made.stop("m")
    with pytest.raises(Refused, match="does not wait"):
        await made.start("n", "standby-w1")
    with pytest.raises(Refused, match="is gone"):
        await made.start("n", "standby-w9")


async def test_what_is_free_costs_nothing_but_has_a_price() -> None:
    made, _ = pool(Volunteer("w1", 0.0, None, True))
    handle = await made.start("m", "standby-w1")
    assert handle.usd_per_h == 0.0
    await made.stop("unknown")
