from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2.data.maths.grader import Grader, GradingError
from echo2.data.maths.lane import RETIRE_AFTER

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def own() -> Iterator[Grader]:
    grader = Grader(lanes=2)
    yield grader
    grader.close()


def test_expressions_are_compared_by_what_they_mean(own: Grader) -> None:
    assert own.compare(r"2^{n-1}", r"\frac{2^n}{2}") == "equal"
    assert own.compare(r"2^{n-1}", r"2^n") == "different"
    assert own.compare(r"\sqrt{2}", r"\frac{") == "unreadable"
    assert own.compare(r"\frac{\sqrt{2}}{2}", r"0.5\sqrt{2}") == "equal"


def test_what_takes_too_much_memory_is_too_costly_and_the_next_is_compared(own: Grader) -> None:
    assert own.compare(r"\sqrt{2}", r"2^{2^{40}}") == "too_costly"
    assert own.compare(r"\sqrt{2}", r"2^{1/2}") == "equal"


def test_a_gold_that_cannot_be_compared_is_an_error_and_no_verdict(own: Grader) -> None:
    with pytest.raises(GradingError, match=r"the gold answer .* cannot be compared \(gold_unreadable\)"):
        own.compare(r"\frac{", "5")
    assert own.unusable([r"\sqrt{2}", r"\frac{", r"\binom{1000000000}{500000000}"]) == [
        None,
        "it is no expression that can be read",
        "reading it takes too much time or memory",
    ]


async def test_comparisons_wait_for_each_other_no_longer_than_they_must(own: Grader) -> None:
    pairs = [(r"\sqrt{2}", "2^{1/2}"), (r"\sqrt{2}", "2^{1/3}")] * 10
    found = await asyncio.gather(*(own.compare_soon(*pair) for pair in pairs))
    assert found == ["equal", "different"] * 10


async def test_a_lane_that_retires_takes_no_comparison_with_it() -> None:
    grader = Grader(lanes=1)
    try:
        found = await asyncio.gather(*(grader.compare_soon("x", "y") for _ in range(RETIRE_AFTER + 50)))
    finally:
        grader.close()
    assert set(found) == {"different"}


def test_a_grader_that_was_killed_is_started_again() -> None:
    grader = Grader(lanes=1)
    try:
        assert grader.compare(r"\sqrt{2}", "2^{1/2}") == "equal"
        assert grader._process is not None
        child = grader._process._child
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert grader.compare(r"\sqrt{2}", "2^{1/2}") == "equal"
    finally:
        grader.close()


DYING = """
import os, signal
from echo2.data.maths.grader import Grader
grader = Grader(lanes=1)
grader.compare("x^2", "x^3")
print(grader._process._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_grader_ends_with_its_program_even_a_killed_one() -> None:
    """Its standard error is ours to read: it closes when the last process of the grader is gone."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DYING]
    done = subprocess.run(command, capture_output=True, timeout=200, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{int(done.stdout)}/fd").exists() or not os.listdir(f"/proc/{int(done.stdout)}/fd")
