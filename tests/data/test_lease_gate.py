"""PROTOCOL §3: the gate keeps expiry rare and never deadlocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.data.lease_gate import GateInputs, closed_because, horizon


def gate(**changes: object) -> GateInputs:
    inputs: dict[str, object] = {
        "next_batch": 0, "horizon": 3, "groups_per_batch": 4, "last_batch": 99, "live": {}, "published": (0,),
    }  # fmt: skip
    return GateInputs(**{**inputs, **changes})  # type: ignore[arg-type]


def test_version_zero_fills_the_batches_that_may_take_it_and_no_more() -> None:
    assert closed_because(gate(live={0: 15}), 0) is None
    assert closed_because(gate(live={0: 16}), 0) is not None


def test_a_version_too_old_for_the_next_batch_gets_nothing_and_is_told_to_install() -> None:
    reason = closed_because(gate(next_batch=4, published=(0, 4)), 0)
    assert reason is not None
    assert "newer snapshot" in reason


def test_a_newer_lease_must_leave_room_for_older_groups_only() -> None:
    full = gate(next_batch=2, live={0: 8}, published=(0, 2))
    assert closed_because(full, 0) is not None
    assert closed_because(full, 2) is None


def test_nothing_is_generated_for_batches_after_the_last() -> None:
    assert closed_because(gate(next_batch=98, last_batch=99, live={97: 8}, published=(97,)), 97) is not None
    assert closed_because(gate(next_batch=98, last_batch=99, live={97: 7}, published=(97,)), 97) is None
    assert closed_because(gate(next_batch=100, published=(100,)), 100) is not None


def test_a_synchronous_run_generates_exactly_one_batch_of_the_newest_version() -> None:
    assert closed_because(gate(horizon=0, next_batch=1, published=(0,)), 0) is not None
    assert closed_because(gate(horizon=0, next_batch=1, live={1: 3}, published=(0, 1)), 1) is None
    assert closed_because(gate(horizon=0, next_batch=1, live={1: 4}, published=(0, 1)), 1) is not None


def test_a_waiting_learner_gets_the_whole_budget_and_a_busy_one_what_is_planned() -> None:
    assert horizon(6, 3.0, learner_waits=True) == 6
    assert horizon(6, 3.0, learner_waits=False) == 3
    assert horizon(6, 9.0, learner_waits=False) == 6
    assert horizon(6, None, learner_waits=False) == 6


@settings(max_examples=300, deadline=None)
@given(
    step=st.integers(0, 40),
    budget=st.integers(0, 8),
    data=st.data(),
    per_batch=st.integers(1, 5),
)
def test_a_waiting_learner_with_less_than_a_batch_alive_always_finds_the_gate_open(
    step: int, budget: int, data: st.DataObject, per_batch: int
) -> None:
    """Liveness: L < P and the newest version within S opens the gate, whatever the versions of what is alive."""
    period = data.draw(st.integers(1, budget + 1))
    newest = step - step % period
    published = tuple(range(max(0, newest - 3 * period), newest + 1, period))
    alive = data.draw(st.lists(st.sampled_from(published), max_size=per_batch - 1))
    live = {version: alive.count(version) for version in set(alive)}
    inputs = GateInputs(step, horizon(budget, None, True), per_batch, 99, live, published)
    assert closed_because(inputs, newest) is None
