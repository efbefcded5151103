from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from closed_loop import offer, rules
from scripted_pool import ScriptedPool, ScriptedRun

from echo2.provisioning.drive import DRAIN_S, STOP_TRIES, Past, drive
from echo2.provisioning.observation import Phase
from echo2.provisioning.rules import Rules
from echo2.simulation.clock import VirtualClock
from echo2.simulation.loop import run_virtual
from echo2.simulation.record import RecordedEvents

CLOCK = VirtualClock()


def driven(
    run: ScriptedRun, script: Callable[[], Awaitable[None]], by: Rules | None = None, past: Past | None = None
) -> RecordedEvents:
    """The loop beside a script, until the script is through and the run over."""
    events = RecordedEvents()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(drive(run, run.pools, by or rules(), CLOCK, events, past))
            await script()
            run.over = True
            run.news.notify()

    run_virtual(main())
    return events


def test_it_starts_what_is_needed_and_gives_everything_back_at_the_end() -> None:
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 0.3))
    run = ScriptedRun(CLOCK, pool)

    async def script() -> None:
        await asyncio.sleep(600.0)
        assert sorted(pool.there) == ["c-1", "c-2", "c-3", "c-4"]

    events = driven(run, script)
    assert (pool.there, sorted(pool.stopped)) == ({}, ["c-1", "c-2", "c-3", "c-4"])
    (activation,) = events.kinds("provisioning_activate")
    assert (activation["machines"], activation["machine_ids"]) == (4, "c-1,c-2,c-3,c-4")
    assert [line["reason"].partition(";")[0] for line in events.kinds("provisioning_keep")] == ["enough"]
    assert run.states[-1].roster.ordered == 4


def test_a_loss_is_looked_at_when_it_is_told_and_not_a_period_later() -> None:
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 0.3))
    run = ScriptedRun(CLOCK, pool)

    async def script() -> None:
        await asyncio.sleep(605.0)
        run.dead.add("c-2")
        run.news.notify()
        await asyncio.sleep(1.0)
        assert pool.started == ["c-1", "c-2", "c-3", "c-4", "c-5"]

    driven(run, script)


def test_a_refused_start_is_a_failed_machine_and_another_offer_takes_its_place() -> None:
    refusing = ScriptedPool("one", CLOCK, offer("a", 1.0, 0.6))
    other = ScriptedPool("two", CLOCK, offer("b", 2.0, 0.6))
    refusing.refuses = 2
    run = ScriptedRun(CLOCK, refusing, other)

    async def script() -> None:
        await asyncio.sleep(100.0)
        assert (refusing.started, sorted(other.there)) == (["a-1", "a-2"], ["b-3", "b-4"])

    events = driven(run, script)
    assert [line["error"] for line in events.kinds("pool_unreachable")] == ["no capacity"] * 2


def test_a_pool_that_hangs_keeps_nobody_from_deciding() -> None:
    hanging = ScriptedPool("one", CLOCK, offer("a", 1.0, 0.6))
    other = ScriptedPool("two", CLOCK, offer("b", 2.0, 0.6))
    hanging.hangs = True
    run = ScriptedRun(CLOCK, hanging, other)

    async def script() -> None:
        await asyncio.sleep(200.0)
        assert sorted(other.there) == ["b-1", "b-2"]

    events = driven(run, script)
    assert {line["pool"] for line in events.kinds("pool_unreachable")} == {"one"}


def test_i05_a_machine_that_was_taken_away_is_told_once_with_what_its_provider_says() -> None:
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 0.3))
    run = ScriptedRun(CLOCK, pool)

    async def script() -> None:
        await asyncio.sleep(605.0)
        gone = msgspec.structs.replace(pool.there["c-2"], phase=Phase.LOST, detail="preempted by the host")
        pool.there["c-2"] = gone
        await asyncio.sleep(300.0)

    (line,) = driven(run, script).kinds("machine_gone")
    assert (line["machine"], line["pool"], line["phase"]) == ("c-2", "one", "lost")
    assert line["detail"] == "preempted by the host"


@pytest.mark.parametrize(("drain_s", "waits_s"), [(5.0, 5.0), (1e6, DRAIN_S)])
def test_a_released_machine_drains_and_is_then_stopped(drain_s: float, waits_s: float) -> None:
    pool = ScriptedPool("one", CLOCK, offer("cheap", 0.5, 0.3), offer("dear", 2.0, 0.3, count=8))
    run = ScriptedRun(CLOCK, pool, t_train_s=50.0)
    run.drain_s = drain_s
    pool.offers["cheap"] = offer("cheap", 0.5, 0.3, count=4)

    async def script() -> None:
        await asyncio.sleep(300.0)
        assert len(pool.there) == 8
        run.t_train_s = 100.0
        await asyncio.sleep(180.0 + 1.0 + waits_s)
        assert sorted(pool.stopped) == ["dear-5", "dear-6", "dear-7", "dear-8"]

    events = driven(run, script)
    assert bool(events.kinds("drain_timed_out")) == (drain_s > DRAIN_S)


def test_a_released_machine_may_finish_a_group_that_takes_long() -> None:
    pool = ScriptedPool("one", CLOCK, offer("cheap", 0.5, 0.3, count=4), offer("dear", 2.0, 0.3, count=8))
    run = ScriptedRun(CLOCK, pool, t_train_s=50.0)
    run.drain_s, run.group_s = 500.0, 600.0

    async def script() -> None:
        await asyncio.sleep(300.0)
        run.t_train_s = 100.0
        await asyncio.sleep(180.0 + DRAIN_S + 100.0)
        assert pool.stopped == []
        await asyncio.sleep(400.0)
        assert len(pool.stopped) == 4

    events = driven(run, script)
    assert not events.kinds("drain_timed_out")


def test_a_spent_budget_ends_the_run_in_order() -> None:
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 0.3))
    run = ScriptedRun(CLOCK, pool)

    async def script() -> None:
        await asyncio.sleep(300.0)
        run.spent_usd = 9.9
        await asyncio.sleep(61.0)
        assert "the budget of 10 USD must pay for the end too" in run.ended
        assert len(pool.there) == 4, "workers finish; the run says when it is over"

    driven(run, script, rules(budget_usd=10.0))
    assert pool.there == {}


def test_a_stop_is_tried_again_and_what_may_still_cost_is_named() -> None:
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 1.2))
    run = ScriptedRun(CLOCK, pool)

    async def script() -> None:
        await asyncio.sleep(300.0)
        pool.deaf_stops = 1

    events = driven(run, script)
    assert (pool.there, len(events.kinds("stop_failed"))) == ({}, 1)

    async def deaf_for_good() -> None:
        await asyncio.sleep(300.0)
        pool.deaf_stops = STOP_TRIES

    events = driven(ScriptedRun(CLOCK, pool), deaf_for_good)
    assert [line["machine"] for line in events.kinds("machine_may_still_cost")] == ["c-1"]


def test_a_machine_that_is_lost_is_given_back_at_once() -> None:
    """A spot machine that was taken away is stopped, not gone: its disk goes on costing."""
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 0.3))
    run = ScriptedRun(CLOCK, pool)

    async def script() -> None:
        await asyncio.sleep(605.0)
        pool.there["c-2"] = msgspec.structs.replace(pool.there["c-2"], phase=Phase.LOST)
        await asyncio.sleep(60.0)
        assert pool.stopped == ["c-2"]
        await asyncio.sleep(60.0)
        assert sorted(pool.there) == ["c-1", "c-3", "c-4", "c-5"]

    driven(run, script)


def test_starts_that_are_under_way_at_the_end_are_called_off_and_stopped() -> None:
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 1.2), start_s=500.0)
    run = ScriptedRun(CLOCK, pool)

    async def script() -> None:
        await asyncio.sleep(100.0)

    driven(run, script)
    assert (pool.started, pool.stopped, pool.there) == (["c-1"], ["c-1"], {})


def test_machines_are_given_back_also_when_the_run_breaks() -> None:
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 1.2))
    run = ScriptedRun(CLOCK, pool)

    def broken(*_: object) -> None:
        if pool.there:
            raise OSError("disk full")

    run.remember = broken  # type: ignore[method-assign]

    async def script() -> None:
        await asyncio.sleep(600.0)

    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        driven(run, script)
    assert pool.stopped == ["c-1"]


def interrupted(pool: ScriptedPool, released: str = "") -> Past:
    """A loop that ends after ten minutes without giving anything back, as with a coordinator that is killed."""
    run = ScriptedRun(CLOCK, pool)

    async def main() -> None:
        loop = asyncio.create_task(drive(run, run.pools, rules(), CLOCK, RecordedEvents()))
        await asyncio.sleep(600.0)
        there, started = dict(pool.there), list(pool.started)
        loop.cancel()
        await asyncio.wait([loop])
        pool.there, pool.started, pool.stopped = there, started, []

    run_virtual(main())
    state = run.past.state
    roster = state.roster.dismiss(released) if released else state.roster
    return Past(msgspec.structs.replace(state, roster=roster).carried_over(600.0, 0.0, 0.0), run.past.handles)


def test_a_pool_that_cannot_be_reached_after_a_restart_has_what_it_had() -> None:
    pool = ScriptedPool("one", CLOCK, offer("a", 1.0, 0.3))
    other = ScriptedPool("two", CLOCK, offer("b", 2.0, 0.3))
    past, had = interrupted(pool), sorted(pool.there)
    pool.hangs = True
    run = ScriptedRun(CLOCK, pool, other)

    async def script() -> None:
        await asyncio.sleep(300.0)
        assert other.started == [], "nobody is gone"

    driven(run, script, past=past)
    assert sorted(pool.stopped) == had, "though it was never reached in this life"


def test_a_release_that_a_restart_interrupted_is_gone_on_with() -> None:
    pool = ScriptedPool("one", CLOCK, offer("c", 1.0, 0.3))
    past = interrupted(pool, released="c-2")
    run = ScriptedRun(CLOCK, pool)

    async def script() -> None:
        await asyncio.sleep(30.0)
        assert (pool.stopped, run.given_back) == (["c-2"], ["c-2"])

    driven(run, script, past=past)
    assert pool.stopped.count("c-2") == 1


def test_a_release_whose_stop_failed_for_long_is_tried_again_while_the_run_lasts() -> None:
    pool = ScriptedPool("one", CLOCK, offer("cheap", 0.5, 0.3, count=4), offer("dear", 2.0, 0.3, count=8))
    run = ScriptedRun(CLOCK, pool, t_train_s=50.0)

    async def script() -> None:
        await asyncio.sleep(300.0)
        run.t_train_s, pool.deaf_stops = 100.0, 4 * STOP_TRIES
        await asyncio.sleep(900.0)
        assert sorted(pool.stopped) == ["dear-5", "dear-6", "dear-7", "dear-8"]

    events = driven(run, script)
    assert len(events.kinds("machine_may_still_cost")) == 4
