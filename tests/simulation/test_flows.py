"""Flows share pipes max-min fairly, and what shares nothing costs nothing."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.simulation.flows import Flow, Flows, Pipe
from echo2.simulation.loop import run_virtual


def end() -> None:
    return None


def test_two_flows_share_a_pipe_and_the_one_that_is_left_has_it_all() -> None:
    async def main() -> list[float]:
        ends: list[float] = []
        flows, pipe = Flows(), Pipe(10.0)
        for nbytes in (50.0, 100.0):
            flows.open((pipe,), nbytes, lambda: ends.append(asyncio.get_running_loop().time()))
        await asyncio.sleep(100)
        assert pipe.carried_bytes == pytest.approx(150.0)
        return ends

    assert run_virtual(main()) == pytest.approx([10.0, 15.0])


def test_a_flow_held_elsewhere_leaves_the_rest_to_the_others() -> None:
    async def main() -> list[float]:
        flows, shared = Flows(), Pipe(10.0)
        slow = flows.open((shared, Pipe(2.0)), 100.0, end)
        fast = flows.open((shared, Pipe(100.0)), 100.0, end)
        return [slow.rate, fast.rate]

    assert run_virtual(main()) == pytest.approx([2.0, 8.0])


def test_a_flow_that_goes_on_to_its_next_goal_disturbs_nobody() -> None:
    async def main() -> tuple[float, int]:
        flows, pipe = Flows(), Pipe(10.0)
        goals = iter([30.0, 40.0, None])
        ended: list[float] = []

        def on_goal() -> float | None:
            following = next(goals)
            if following is None:
                ended.append(asyncio.get_running_loop().time())
            return following

        flows.open((pipe,), 30.0, on_goal)
        settled = flows.settled
        await asyncio.sleep(9.9)
        assert flows.settled == settled
        await asyncio.sleep(1)
        return ended[0], flows.settled - settled

    assert run_virtual(main()) == (10.0, 0)


def test_what_one_flow_costs_does_not_grow_with_those_it_shares_nothing_with() -> None:
    async def cost(pairs: int) -> int:
        flows = Flows()
        for _ in range(pairs):
            flows.open((Pipe(10.0), Pipe(10.0)), 1e6, end)
        before = flows.settled
        flows.open((Pipe(10.0), Pipe(10.0)), 1e6, end)
        return flows.settled - before

    assert run_virtual(cost(1000)) == run_virtual(cost(1)) == 1


def is_max_min_fair(flows: list[Flow]) -> bool:
    """Every flow has a full pipe on which nobody has more than it."""
    return all(
        any(
            sum(other.rate for other in pipe.flows) >= 0.999999 * pipe.capacity
            and flow.rate >= 0.999999 * max(other.rate for other in pipe.flows)
            for pipe in flow.pipes
        )
        for flow in flows
    )


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_rates_are_max_min_fair_after_any_comings_and_goings(seed: int) -> None:
    async def main() -> None:
        random, flows = Random(seed), Flows()
        pipes = [Pipe(random.uniform(1, 20)) for _ in range(random.randint(2, 12))]
        living: list[Flow] = []
        for _ in range(40):
            if living and random.random() < 0.4:
                flows.close(living.pop(random.randrange(len(living))))
            else:
                living.append(flows.open(tuple(random.sample(pipes, 2)), 1e12, end))
            await asyncio.sleep(random.choice([0.0, 0.1]))
            assert all(sum(x.rate for x in pipe.flows) <= 1.000001 * pipe.capacity for pipe in pipes)
            assert is_max_min_fair(living)

    run_virtual(main())


def test_a_crowd_on_one_pipe_is_settled_together_and_ends_when_it_should() -> None:
    async def main() -> tuple[float, int]:
        flows, pipe, ends = Flows(), Pipe(1000.0), list[float]()
        for _ in range(500):
            flows.open((pipe, Pipe(50.0)), 20.0, lambda: ends.append(asyncio.get_running_loop().time()))
        await asyncio.sleep(60)
        assert len(ends) == 500
        return max(ends), flows.settled

    took_s, settled = run_virtual(main())
    assert took_s == pytest.approx(10.0, abs=0.1)
    assert settled < 20_000
