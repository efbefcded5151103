"""Rehearsed work: how long it takes, and what a process that stands still gets done."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from echo2.pace import Pace, working_sleep


class StandingStill:
    """A clock on which a sleep lasts ``stretch`` times as long as it was asked to."""

    def __init__(self, stretch: float) -> None:
        self.stretch, self.now_s = stretch, 0.0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += self.stretch * seconds


def test_durations_have_the_stated_median_and_repeat_with_the_same_random_numbers() -> None:
    pace = Pace(2.0, 0.3)
    drawn = [pace.draw_s(Random(number)) for number in range(2000)]
    assert median(drawn) == pytest.approx(2.0, rel=0.05)
    assert drawn[:3] == [pace.draw_s(Random(number)) for number in range(3)]


def test_no_pace_takes_no_time() -> None:
    assert Pace().draw_s(Random(0)) == 0.0


@pytest.mark.parametrize(("stretch", "takes_s"), [(1.0, 10.0), (1.5, 10.0), (4.0, 20.0)])
async def test_a_process_that_is_stopped_most_of_the_time_gets_less_done(stretch: float, takes_s: float) -> None:
    world = StandingStill(stretch)
    await working_sleep(10.0, clock=world.clock, sleep=world.sleep)
    assert world.now_s == pytest.approx(takes_s, rel=0.02)
