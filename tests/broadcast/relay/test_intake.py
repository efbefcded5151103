from __future__ import annotations

import pytest

from echo2.broadcast.plan.model import SEED, Stretch
from echo2.broadcast.relay.frames import Feed, Source
from echo2.broadcast.relay.intake import DIAL_S, PLANNED_TURNS, SILENT_S, STARVED_S, TRICKLE_S, FeedState

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


def silent(backlog: int) -> FeedState:
    state = FeedState(Feed((Source(SEED, "", 0),), (Stretch(0, 9),), 1.0, True), 0, 0.0)
    state.stream = 1
    state.parent_has(backlog, CHUNK, 0.0)
    return state


def test_a_parent_without_anything_to_send_is_left_when_it_was_silent_for_long_and_is_not_to_blame() -> None:
    assert judged(10, 0, 0, backlog=0) == ""
    state = silent(0)
    assert state.fails(0.0, SILENT_S - 0.1) == ""
    assert "nothing for" in state.fails(0.0, SILENT_S)
    assert state.starves(0.0, SILENT_S) == "", "its own parent may have stalled"
    assert state.fails(1.0, SILENT_S) == "", "another feed of the object brought something since"


def test_a_parent_that_has_chunks_and_is_silent_is_to_blame() -> None:
    state = silent(1)
    assert state.starves(0.0, SILENT_S - 0.1) == ""
    assert "sent none" in state.starves(0.0, SILENT_S)
    assert state.starves(1.0, SILENT_S) == ""


def test_h05_a_receiver_that_stood_still_itself_does_not_blame_its_parent() -> None:
    state = silent(1)
    state.stood_still(8.0, 8.0)
    assert state.starves(0.0, 8.5) == ""
    assert "sent none" in state.starves(0.0, 8.0 + SILENT_S)


def test_sources_that_cannot_be_dialled_are_passed_over_and_the_seed_never_is() -> None:
    state = FeedState(Feed((Source("p", "", 1), Source("g", "", 1), Source(SEED, "", 1)), (), 1.0, True), 0, 0.0)
    state.skip({"g"})
    assert state.source.node_id == "p"
    state.skip({"p"})
    assert state.source.node_id == "g"
    state.skip({"p", "g", SEED})
    assert state.source.node_id == SEED
    state.skip({SEED})
    assert state.source.node_id == SEED


RATE = 10.0 * CHUNK
PAIR = (Source("p", "p.test", 1), Source(SEED, "", 0))


def trickled(
    bytes_per_s: float, *, others: float = 0.0, since_turns: int = 0, sources: tuple[Source, ...] = PAIR
) -> str:
    """A feed whose source says that it has nothing, after a while: why it is left."""
    state = FeedState(Feed(sources, (Stretch(0, 1000),), RATE, True), 0, 0.0)
    for _ in range(since_turns):
        state.stream, state._trickles = 1, True
        state.turn(set(), 0.0)
    state.stream = 1
    for tenth in range(round(10 * TRICKLE_S) + 2):
        state.parent_has(0, CHUNK, tenth / 10)
        state.received(round(bytes_per_s * tenth / 10), round((bytes_per_s + others) * tenth / 10), CHUNK, tenth / 10)
    assert state.starves(TRICKLE_S, TRICKLE_S) == "", "it may be honest"
    return state.fails(TRICKLE_S, TRICKLE_S)


def test_a_parent_that_says_it_has_nothing_and_trickles_is_left_in_the_end() -> None:
    assert "far less than planned" in trickled(0.05 * RATE)
    assert trickled(0.5 * RATE) == ""


def test_while_other_sources_bring_enough_nobody_is_left_for_a_trickle() -> None:
    """In a ring they bring theirs by turns; a second stream that brings a little must not hide the trickle."""
    assert trickled(0.05 * RATE, others=0.9 * RATE) == ""
    assert "far less than planned" in trickled(0.05 * RATE, others=0.2 * RATE)


def test_where_every_source_trickles_the_plan_was_wrong_and_the_only_one_is_kept() -> None:
    assert trickled(0.05 * RATE, since_turns=PLANNED_TURNS) == ""
    assert trickled(0.05 * RATE, sources=PAIR[1:]) == ""


def test_a_source_to_which_no_connection_comes_about_is_left() -> None:
    state = FeedState(Feed(PAIR, (), 1.0, True), 0, 0.0)
    state.dialling_since_s = 1.0
    assert state.fails(0.9 + DIAL_S, 0.9 + DIAL_S) == ""
    assert "no connection" in state.fails(1.0 + DIAL_S, 1.0 + DIAL_S)
    state.turn(set(), 1.0 + DIAL_S)
    assert state.fails(50.0, 50.0) == ""


def test_h05_time_in_which_we_stood_still_is_no_time_without_a_connection() -> None:
    state = FeedState(Feed(PAIR, (), 1.0, True), 0, 0.0)
    state.dialling_since_s = 1.0
    state.stood_still(5.0, 5.0)
    assert state.fails(5.9 + DIAL_S, 5.9 + DIAL_S) == ""
