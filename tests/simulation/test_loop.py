from __future__ import annotations

import asyncio
import contextlib

import pytest

from echo2.simulation.clock import CountedIds, VirtualClock
from echo2.simulation.loop import Deadlock, run_virtual


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        clock = VirtualClock()
        seen = [clock.monotonic()]
        await asyncio.sleep(3600 * 48)
        seen.append(clock.monotonic())
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(5))
            group.create_task(asyncio.sleep(7.5))
        seen.append(clock.monotonic())
        return seen

    assert run_virtual(main()) == [0.0, 172800.0, 172807.5]


def test_a_timeout_fires_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(12.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 12.0


def test_a_deadlock_is_reported_with_tasks_and_lines() -> None:
    async def wait_for_batch(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        event = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_batch(event), name="learner")
            group.create_task(wait_for_batch(event), name="lease loop")

    with pytest.raises(Deadlock) as caught:
        run_virtual(main())
    text = str(caught.value)
    assert "nothing can happen any more" in text
    assert "learner waits in" in text and "lease loop waits in" in text
    assert "wait_for_batch" in text and "on: await event.wait()" in text


def test_a_cancelled_timer_does_not_hide_a_deadlock() -> None:
    async def main() -> None:
        handle = asyncio.get_running_loop().call_later(100, print)
        handle.cancel()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"at 0\.000 s"):
        run_virtual(main())


def test_endless_polling_is_reported_at_the_time_limit() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(30)

    with pytest.raises(Deadlock, match="had to end by 1000 s"):
        run_virtual(main(), until_s=1000)


def test_spinning_without_time_is_reported() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="without time going on"):
        run_virtual(main())


def test_threads_and_sockets_are_refused() -> None:
    async def thread() -> None:
        await asyncio.to_thread(print)

    async def socket() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    for main in (thread, socket):
        with pytest.raises(RuntimeError, match="virtual time has no threads"):
            run_virtual(main())


def test_cancellation_order_is_the_order_of_creation() -> None:
    async def worker(name: str, log: list[str]) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            log.append(name)

    async def main() -> list[str]:
        log: list[str] = []
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for name in "abcdefgh":
                    group.create_task(worker(name, log))
                await asyncio.sleep(1)
                raise ValueError("stop")
        return log

    assert run_virtual(main()) == run_virtual(main()) == list("abcdefgh")


def test_an_error_nobody_awaits_fails_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="failed unseen"):
        run_virtual(main())


def test_cleanup_runs_after_a_deadlock() -> None:
    log: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            log.append("cleaned")

    with pytest.raises(Deadlock):
        run_virtual(main())
    assert log == ["cleaned"]


def test_wall_clocks_may_lie_and_ids_count() -> None:
    async def main() -> tuple[float, float]:
        fast = VirtualClock(skew_s=600)
        jumping = VirtualClock(skew_s=lambda t: -60.0 if t >= 10 else 0.0)
        await asyncio.sleep(10)
        return fast.wall() - VirtualClock().wall(), jumping.wall() - VirtualClock().wall()

    assert run_virtual(main()) == (600.0, -60.0)
    ids = CountedIds()
    assert [ids.new("lease"), ids.new("peer"), ids.new("lease")] == ["lease-1", "peer-1", "lease-2"]


def test_an_interruption_winds_all_tasks_up_and_is_raised() -> None:
    ended: list[str] = []

    async def live(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append(name)

    async def interrupted() -> None:
        await asyncio.sleep(5)
        raise KeyboardInterrupt

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(live("inner"))
            group.create_task(interrupted())
            async with asyncio.TaskGroup() as others:
                others.create_task(live("outer"))

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    assert sorted(ended) == ["inner", "outer"]
