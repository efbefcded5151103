"""When a held connection's congestion control begins anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.relay.renewal import FIRST_S, PAUSE_S, RENEW_S, Renewal

LOOK_S = 0.125
LONGEST_S = 10.0
"""After so long without renewal BBR makes a gap."""


class Line:
    """A connection that is looked at eight times a second."""

    def __init__(self) -> None:
        self.renewal = Renewal()
        self._acked = 0
        self.now = 50.0

    def goes(self, seconds: float, *, held: bool = True, sends: bool = True) -> list[float]:
        """When it was renewed, from when this began."""
        began_s, renewed = self.now, []
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            self._acked += 1000 * sends
            if self.renewal.is_due(held, self._acked, self.now):
                renewed.append(self.now - began_s - LOOK_S)
        return renewed


def test_a_held_connection_is_renewed_before_it_would_make_a_gap() -> None:
    assert Line().goes(20.0) == [FIRST_S, FIRST_S + RENEW_S, FIRST_S + 2 * RENEW_S]
    assert FIRST_S + RENEW_S <= LONGEST_S


def test_a_short_transfer_goes_on_with_what_is_known() -> None:
    line = Line()
    for _ in range(5):
        assert not line.goes(FIRST_S - LOOK_S)
        assert not line.goes(1.0, sends=False)


def test_a_free_connection_and_an_idle_one_are_left_alone() -> None:
    assert not Line().goes(30.0, held=False)
    line = Line()
    assert line.goes(FIRST_S + 2 * LOOK_S)
    assert not line.goes(30.0, sends=False)


def test_a_pause_between_chunks_changes_nothing() -> None:
    line = Line()
    line.goes(FIRST_S - PAUSE_S)
    assert not line.goes(PAUSE_S - LOOK_S, sends=False)
    assert len(line.goes(4 * LOOK_S)) == 1


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.05, 3.0)), max_size=60))
def test_it_is_never_renewed_twice_within_the_time_between_two(steps: list[tuple[bool, bool, float]]) -> None:
    renewal, now, acked, last_s = Renewal(), 0.0, 0, float("-inf")
    for held, sends, passed_s in steps:
        now, acked = now + passed_s, acked + sends
        if renewal.is_due(held, acked, now):
            assert held
            assert now - last_s >= FIRST_S
            last_s = now
