"""When a held connection's congestion control begins anew."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.relay.renewal import FLOWS_S, PAUSE_S, RENEW_S, Renewal

LOOK_S = 0.0625
LONGEST_S = 10.0
"""After so long without renewal BBR makes a gap."""


class Line:
    """A connection that is looked at sixteen times a second."""

    def __init__(self) -> None:
        self.renewal = Renewal()
        self._acked = 0
        self.now = 50.0

    def goes(self, seconds: float, *, held: bool = True, sends: bool = True, queues: bool = False) -> list[float]:
        """When it was renewed, from when this began."""
        began_s, renewed = self.now, []
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            self._acked += 1000 * sends
            if self.renewal.is_due(held, self._acked, queues, self.now):
                renewed.append(self.now - began_s - LOOK_S)
        return renewed


def test_a_held_connection_is_renewed_as_soon_as_it_flows_and_before_it_would_make_a_gap() -> None:
    first_s, *later_s = Line().goes(20.0)
    assert FLOWS_S <= first_s <= 2 * FLOWS_S
    assert [after - before for before, after in pairwise([first_s, *later_s])] == [RENEW_S, RENEW_S]
    assert RENEW_S + 2 * FLOWS_S < LONGEST_S


def test_a_free_connection_and_an_idle_one_are_left_alone() -> None:
    assert not Line().goes(30.0, held=False)
    line = Line()
    assert line.goes(1.0)
    assert not line.goes(30.0, sends=False)


def test_each_transfer_begins_with_what_is_known_of_the_connection() -> None:
    line = Line()
    for _ in range(5):
        assert not line.goes(LOOK_S)
        assert len(line.goes(1.0)) == 1
        assert not line.goes(2 * PAUSE_S, sends=False)


def test_a_pause_between_chunks_changes_nothing() -> None:
    line = Line()
    line.goes(RENEW_S)
    assert not line.goes(PAUSE_S - LOOK_S, sends=False)
    assert len(line.goes(4 * LOOK_S)) == 1


def test_where_packets_wait_it_is_left_alone_until_they_do_not() -> None:
    line = Line()
    assert not line.goes(30.0, queues=True)
    assert len(line.goes(1.0)) == 1


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.floats(0.05, 3.0)), max_size=60))
def test_it_is_never_renewed_twice_within_the_time_between_two(steps: list[tuple[bool, bool, bool, float]]) -> None:
    renewal, now, acked, last_s = Renewal(), 0.0, 0, float("-inf")
    for held, sends, queues, passed_s in steps:
        now, acked = now + passed_s, acked + sends
        if renewal.is_due(held, acked, queues, now):
            assert held and not queues
            assert now - last_s >= FLOWS_S
            last_s = now
