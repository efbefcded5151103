from __future__ import annotations

from echo2.broadcast.relay.unreachable import FIRST_S, MOST_S, Unreachable


def test_who_could_not_be_dialled_is_told_for_a_while() -> None:
    unreachable = Unreachable()
    unreachable.failed("b", 10.0)
    unreachable.failed("a", 11.0)
    assert unreachable.peers(12.0) == ["a", "b"]
    assert unreachable.peers(10.0 + FIRST_S) == ["a"]


def test_failures_meanwhile_make_it_no_longer_and_later_ones_do() -> None:
    unreachable, now = Unreachable(), 0.0
    lasted: list[float] = []
    for _ in range(8):
        unreachable.failed("a", now)
        unreachable.failed("a", now + 1.0)
        until = next(s for s in range(1, 10_000) if not unreachable.peers(now + s))
        lasted.append(until)
        now += until
    assert lasted == [min(FIRST_S * 2**k, MOST_S) for k in range(8)]


def test_who_answers_is_forgotten() -> None:
    unreachable = Unreachable()
    unreachable.failed("a", 0.0)
    unreachable.answered("a")
    unreachable.answered("b")
    assert unreachable.peers(1.0) == []
