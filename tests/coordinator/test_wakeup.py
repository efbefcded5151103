from __future__ import annotations

import asyncio
from random import Random

from echo2.coordinator.wakeup import LeaseQueue, Wakeup
from echo2.simulation.loop import run_virtual
from echo2.transport.messages import LeaseWait
from echo2.types import Policy

LOST_S = 1000.0
"""A wait that lasts so long slept through its notification."""


def test_a_thousand_interleavings_of_producers_and_consumers_lose_no_wake_up() -> None:
    """Field report D10: what was produced is consumed at once, whoever waits, gives up or asks again meanwhile."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for seed in range(1000):
            random = Random(seed)
            wakeup, stock, eaten = Wakeup(), [0], [0]
            count = random.randint(1, 6)

            async def produce(wakeup: Wakeup = wakeup, stock: list[int] = stock, random: Random = random) -> None:
                for _ in range(random.randint(0, 4)):
                    await asyncio.sleep(0)
                stock[0] += 1
                wakeup.notify()

            async def consume(
                wakeup: Wakeup = wakeup, stock: list[int] = stock, eaten: list[int] = eaten, random: Random = random
            ) -> None:
                for _ in range(random.randint(0, 4)):
                    await asyncio.sleep(0)
                while not stock[0]:
                    # Now and then a client whose wait is over before anything came, and who asks again.
                    await wakeup.wait(random.choice([0.0, LOST_S, LOST_S]))
                stock[0] -= 1
                eaten[0] += 1

            began = loop.time()
            async with asyncio.TaskGroup() as group:
                for work in random.sample([produce, consume] * count, 2 * count):
                    group.create_task(work())
            assert eaten[0] == count
            assert loop.time() - began < LOST_S, f"seed {seed}: a wake-up was lost"

    run_virtual(main())


def test_a_wait_ends_at_its_deadline_and_leaves_nothing_behind() -> None:
    """I7"""

    async def main() -> None:
        wakeup = Wakeup()
        assert await wakeup.wait(5.0) is False
        assert asyncio.get_running_loop().time() == 5.0
        assert await wakeup.wait(-1.0) is False
        wakeup.notify()

    run_virtual(main())


def test_waiters_of_one_version_are_served_in_order_and_those_who_left_are_passed_over() -> None:
    async def main() -> None:
        queue, old, new = LeaseQueue(), Policy(0, 0), Policy(0, 2)
        first, second = queue.put("w1", old), queue.put("w2", old)
        third = queue.put("w3", new)
        assert queue.versions() == [new, old]
        assert queue.first(old) == ("w1", first)
        queue.forget(first)
        assert queue.first(old) == ("w2", second)
        queue.send_back("w2", new)
        assert second.result() == LeaseWait("0.2 was installed meanwhile")
        assert queue.first(old) is None
        assert queue.versions() == [new]
        assert not third.done()

    run_virtual(main())
