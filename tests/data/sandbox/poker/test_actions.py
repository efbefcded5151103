from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.data.sandbox.poker.actions import Action, Bounds, read, settle
from echo2.data.sandbox.sandbox import Fault

FACING = Bounds(to_call=20, facing=40, in_front=20, stack=100, min_to=60, max_to=120)
FREE = Bounds(to_call=0, facing=0, in_front=0, stack=100, min_to=2, max_to=100)
SHORT = Bounds(to_call=15, facing=40, in_front=0, stack=15, min_to=None, max_to=None)


def taken(reply: str, bounds: Bounds) -> Action | str:
    """The action, or the status of the fault."""
    said = read(reply)
    done = said if isinstance(said, Fault) else settle(said, bounds)
    return done.status if isinstance(done, Fault) else done


@pytest.mark.parametrize(
    ("reply", "bounds", "result"),
    [
        ("check", FACING, "illegal"),
        ("bet 30", FACING, "illegal"),
        ("bet 60", FACING, "illegal"),
        ("raise", FACING, "unclear"),
        ("I won't raise 100, I fold", FACING, "unclear"),
        ("Action: call\nAction: fold", FACING, "unclear"),
        ("call, then raise to 80", FACING, "unclear"),
        ("", FACING, "unclear"),
        ("   \n", FACING, "unclear"),
        ("<think>Action: call</think>", FACING, "unclear"),
        ("<think>I will fold. Action: fold", FACING, "unclear"),
        ("FOLD.", FACING, Action("fold")),
        ("je me couche", FACING, "unclear"),
        ("call", SHORT, Action("call")),
        ("call 40", SHORT, Action("call")),
        ("all-in", SHORT, Action("call")),
        ("raise to 40", SHORT, "illegal"),
    ],
)
def test_g09_an_illegal_or_unclear_reply_has_one_outcome(reply: str, bounds: Bounds, result: Action | str) -> None:
    assert taken(reply, bounds) == result


@pytest.mark.parametrize(
    ("reply", "bounds", "result"),
    [
        ("<think>They bluff.</think>\nAction: Raise 60", FACING, Action("raise", 60)),
        ("I have the odds for it.\n**Action:** raise to 1,00", FACING, "unclear"),
        ("Thinking aloud: fold? No.\n**Action: call**", FACING, Action("call")),
        ("ACTION : All in!", FACING, Action("raise", 120)),
        ("`raise to $80`", FACING, Action("raise", 80)),
        ("raise to 80 chips", FACING, Action("raise", 80)),
        ("raise to 59", FACING, "illegal"),
        ("raise to 121", FACING, "illegal"),
        ("raise to 60.5", FACING, "unclear"),
        ("raise to -60", FACING, "unclear"),
        ("call 20", FACING, Action("call")),
        ("call 40", FACING, Action("call")),
        ("call 5", FACING, "illegal"),
        ("check", FREE, Action("check")),
        ("fold", FREE, "illegal"),
        ("call", FREE, "illegal"),
        ("bet 10", FREE, Action("bet", 10)),
        ("raise to 10", FREE, Action("bet", 10)),
    ],
)
def test_replies_are_taken_as_said_or_not_at_all(reply: str, bounds: Bounds, result: Action | str) -> None:
    assert taken(reply, bounds) == result


@given(st.text(max_size=80), st.sampled_from([FACING, FREE, SHORT]))
def test_no_text_is_a_crash(reply: str, bounds: Bounds) -> None:
    done = taken(reply, bounds)
    assert isinstance(done, Action) or done in ("unclear", "illegal")


def test_a_thousands_separator_is_understood() -> None:
    assert taken("raise to 1,200", Bounds(20, 40, 20, 5000, 60, 5020)) == Action("raise", 1200)
