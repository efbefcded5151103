from __future__ import annotations

import pytest

from echo2.broadcast.plan.model import SEED, Stretch
from echo2.broadcast.relay.frames import Feed, Source
from echo2.broadcast.relay.intake import SILENT_S, STARVED_S, FeedState

CHUNK = 2**20


def judged(planned_chunks_per_s: float, got_per_s: float, parent_gains_per_s: float, backlog: float = 10.0) -> str:
    """A feed after a starving window: what it says of its parent."""
    sources = (Source("p", "p.test", 1), Source(SEED, "", 0))
    state = FeedState(Feed(sources, (Stretch(0, 1000),), planned_chunks_per_s * CHUNK, True), 0, 0.0)
    state.stream = 1
    for half_seconds in range(round(2 * STARVED_S) + 1):
        now = half_seconds / 2
        state.parent_has(round(backlog + now * (parent_gains_per_s - got_per_s)), CHUNK, now)
        for _ in range(round(got_per_s / 2) if half_seconds else 0):
            state.got_chunk(now)
    return state.starves(0.0, STARVED_S)


@pytest.mark.parametrize(
    ("planned", "got", "gains", "is_left"),
    [
        (10, 10, 10, False),
        (10, 4, 10, False),
        (10, 2, 10, True),
        (10, 2, 2, False),
        (40, 2, 2, True),
        (10, 8, 40, False),  # it takes in far more than its own line carries away, as on cable and ADSL lines
        (0, 8, 40, True),
    ],
)
def test_a_parent_is_left_that_sends_far_less_than_it_could(planned: int, got: int, gains: int, is_left: bool) -> None:
    assert ("too few" in judged(planned, got, gains)) is is_left


def test_a_parent_without_anything_to_send_is_not_to_blame_until_it_was_silent_for_long() -> None:
    assert judged(10, 0, 0, backlog=0) == ""
    state = FeedState(Feed((Source(SEED, "", 0),), (Stretch(0, 9),), 1.0, True), 0, 0.0)
    state.stream = 1
    assert state.starves(0.0, SILENT_S - 0.1) == ""
    assert "no chunk" in state.starves(0.0, SILENT_S)
    assert state.starves(1.0, SILENT_S) == "", "another feed of the object brought something since"


def test_h05_a_receiver_that_stood_still_itself_does_not_blame_its_parent() -> None:
    state = FeedState(Feed((Source(SEED, "", 0),), (Stretch(0, 9),), 1.0, True), 0, 0.0)
    state.stream = 1
    state.stood_still(8.0)
    assert state.starves(0.0, 8.5) == ""
    assert "no chunk" in state.starves(0.0, 8.0 + SILENT_S)
