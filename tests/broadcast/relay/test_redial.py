from __future__ import annotations

import pytest

from echo2.broadcast.relay.redial import FIRST_S, MOST_S, STEADY_S, Redial


def pauses(life: int, count: int = 8) -> list[float]:
    """Between failures, to a tenth of a second."""
    redial, now, taken = Redial(life, 0.0), 0.0, []
    for _ in range(count):
        redial.failed(now)
        tenths = next(k for k in range(1, 200) if redial.due(now + k / 10))
        taken.append(tenths / 10)
        now += tenths / 10
    return taken


def test_pauses_grow_to_a_limit() -> None:
    for k, pause in enumerate(pauses(7)):
        longest = min(FIRST_S * 2**k, MOST_S)
        assert longest / 2 <= pause <= longest + 0.1


def test_h09_nodes_pause_differently() -> None:
    assert len({tuple(pauses(life)) for life in range(50)}) == 50


def test_other_connections_that_fail_meanwhile_make_the_pause_no_longer() -> None:
    redial = Redial(1, 0.0)
    redial.failed(0.0)
    redial.failed(0.1)
    assert redial.rests
    assert redial.due(FIRST_S)


@pytest.mark.parametrize("life", range(5))
def test_a_link_that_was_lost_is_made_again_soon(life: int) -> None:
    redial = Redial(life, 0.0)
    assert redial.due(0.0)
    for _ in range(6):
        redial.failed(0.0)
        redial.due(100.0)
    redial.answered(150.0)
    redial.lost(200.0)
    assert redial.rests
    assert redial.due(200.0 + FIRST_S)


def test_h09_a_seed_that_answers_and_hangs_up_at_once_is_dialled_ever_less_often() -> None:
    redial, now, dials = Redial(3, 0.0), 0.0, 0
    while now < 60.0:
        now += 0.1
        if redial.due(now):
            dials += 1
            redial.answered(now)
            redial.lost(now + 0.05)
    assert dials < 15


def test_after_a_connection_that_lasted_pauses_begin_anew() -> None:
    redial = Redial(3, 0.0)
    for k in range(6):
        redial.failed(20.0 * k)
        redial.due(20.0 * k + MOST_S)
    redial.answered(200.0)
    redial.failed(200.0 + STEADY_S)  # another connection, beside the one that stands
    assert redial.due(200.0 + STEADY_S + FIRST_S)


def test_a_link_that_brought_something_is_made_again_soon_however_short_it_was() -> None:
    redial = Redial(3, 0.0)
    for k in range(9):
        redial.answered(10.0 * k)
        redial.lost(10.0 * k, brought=True)
        assert redial.due(10.0 * k + FIRST_S)
