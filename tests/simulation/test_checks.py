"""What no simulated run may do is noticed, whoever does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from scenarios import line, scenario

from echo2.data.buffer import Buffer
from echo2.data.groups import Batch, GroupState
from echo2.metrics import StepMetrics
from echo2.simulation.checks import BrokenPromise, check_run
from echo2.simulation.play import play

GOOD = [line(step) for step in range(5)]


def check(metrics: Sequence[StepMetrics], budget: int = 2, weights: str = "initial", events: Any = ()) -> None:
    check_run(metrics, events, weights, budget)


def test_a_run_that_kept_its_promises_passes() -> None:
    check(GOOD)
    check([])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"staleness_histogram": {"2": 7, "3": 1}, "staleness_max": 3}, "I1: .*than S = 2 .*step 3 holds one of 3"),
        ({"staleness_histogram": {"2": 7, "3": 1}}, "I1: .*step 3 holds one of 3"),
        ({"staleness_max": 4}, "I1: .*step 3 holds one of 4"),
        ({"staleness_histogram": {"-1": 1, "2": 7}}, "I2: .*later version"),
        ({"expired": 1}, r"I3: generated must be .*got 36 = 32 \+ 1 \+ 0 \+ 4 \+ 0 in step 3"),
        ({"step": 4}, "I3: step 2 must be followed by step 3, got 4"),
        ({"step": 2}, "I3: step 2 must be followed by step 3, got 2"),
        ({"trained": 20, "buffered": 16}, "I3: trained must never fall, got 24, then 20"),
        ({"trained": 30, "buffered": 6}, "I3: a row must be trained once, and step 3 trained on 8 rows of which 6"),
        ({"cost_usd": 0.2}, "cost_usd must never fall, got 0.3"),
    ],
)  # fmt: skip
def test_a_broken_promise_is_told_with_its_step_and_numbers(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BrokenPromise, match=words):
        check([*GOOD[:3], msgspec.structs.replace(GOOD[3], **changes), *GOOD[4:]])


def test_a_run_begins_at_its_first_step() -> None:
    with pytest.raises(BrokenPromise, match="I3: the first line must be of step 0, got 1"):
        check(GOOD[1:])


def test_a_rollback_trains_steps_again_and_its_rows_count_once() -> None:
    again = [line(step, policy_incarnation=1, trained=40, generated=44, cost_usd=0.5) for step in (3, 4)]
    onwards = line(5, policy_incarnation=1)
    check([*GOOD, *again, onwards])
    with pytest.raises(BrokenPromise, match="step 4 must be followed by step 5, got 3"):
        check([*GOOD, line(3, trained=40, generated=44, cost_usd=0.5)])


def test_the_learners_weights_are_those_of_the_batches_in_their_order() -> None:
    def batch(step: int, digest: str) -> dict[str, Any]:
        return {"kind": "batch", "step": step, "digest": digest}

    def trained_on(*digests: str) -> str:
        weights = "initial"
        for digest in digests:
            weights = blake3(f"{weights}/{digest}".encode()).hexdigest()
        return weights

    events = [batch(0, "never durable"), batch(0, "a"), batch(1, "b"), {"kind": "step"}]
    check(GOOD, events=events, weights=trained_on("a", "b"))
    check(GOOD, events=events, weights=trained_on("a"))
    for other in (trained_on("b", "a"), trained_on("a", "a", "b"), trained_on("never durable", "b")):
        with pytest.raises(BrokenPromise, match="weights must be those of the batches"):
            check(GOOD, events=events, weights=other)


# ---- production code with a fault in it, played ----------------------------------------------------------------------

SLOW_PUBLISHES: dict[str, Any] = {
    "run": {"steps": 16},
    "rehearsal": {"group_spread": 1.2, "snapshot_bytes": 600_000_000},
    "world": {"delta_share": 0.0},
}
"""Some trajectories are as old as they may be, and some older."""


@pytest.mark.parametrize("slack", [1, 1000])
def test_i1_a_buffer_that_admits_more_than_the_budget_is_caught(monkeypatch: pytest.MonkeyPatch, slack: int) -> None:
    """I1, the guarantee itself taken away: t - S becomes t - S - 1, or nothing is too old."""
    made = scenario(**SLOW_PUBLISHES)
    sound = play(made).outcome
    assert sound.refused, "some come too late"
    assert sound.staleness is not None and sound.staleness.max == made.config.staleness_budget

    def lax(buffer: Buffer) -> int:
        return buffer.next_batch - buffer.rules.staleness_budget - slack

    monkeypatch.setattr(Buffer, "oldest_admissible", property(lax))
    with pytest.raises(
        BrokenPromise, match=r"I1: no batch may hold a trajectory older than S = 4 .* holds one of [56]"
    ):
        play(made)


def test_i3_a_buffer_that_hands_out_a_group_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """I3: a row is trained once."""
    form_batch = Buffer.form_batch

    def twice(buffer: Buffer) -> Batch | None:
        before = buffer.batches.get(buffer.next_batch - 1)
        if before is not None and buffer.next_batch == 5:
            for group_id in sorted({key[0] for key in before.rows}):
                group = buffer.groups[group_id]
                group.state = GroupState.CLOSED
                buffer._put(group)
        return form_batch(buffer)

    monkeypatch.setattr(Buffer, "form_batch", twice)
    with pytest.raises(
        BrokenPromise, match=r"I3: a row must be trained once, and step 5 trained on 16 rows of which 0"
    ):
        play(scenario())
