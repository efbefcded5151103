from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.data.answers import parse_gold
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.errors import UserError


def reward(gold: str, reply: str) -> float:
    task = Arithmetic()
    return task.score(task.prompt_for_gold(gold), reply).reward


@pytest.mark.parametrize(
    ("gold", "reply", "expected"),
    [
        # A01: leading zeros and integer forms
        ("16", r"\boxed{016}", 1),
        ("73", r"\boxed{073}", 1),
        ("073", r"\boxed{73}", 1),
        ("0", r"\boxed{000}", 1),
        ("16", r"\boxed{160}", 0),
        ("16", r"\boxed{-16}", 0),
        ("16", r"\boxed{16.5}", 0),
        ("33", r"\boxed{33.0}", 1),
        # A02: the same answer boxed twice
        ("840", "so \\boxed{840}. \n\nFinal Answer\n\\boxed{840}", 1),
        ("4", r"\boxed{004} and \boxed{004}", 1),
        # A03: the last box counts
        ("7", r"First attempt gives \boxed{5}. Wrong; so \boxed{7}.", 1),
        ("5", r"First attempt gives \boxed{5}. Wrong; so \boxed{7}.", 0),
        # A12: equality is exact
        ("3", r"\boxed{3.0000001}", 0),
        ("2", r"\boxed{\frac{1}{2}}", 0),
        ("2", r"\boxed{\frac{4}{2}}", 1),
        # A15: signs, units, bold
        ("-5", r"\boxed{-5}", 1),
        ("-5", "\\boxed{\u22125}", 1),
        ("-5", r"\boxed{5}", 0),
        ("5", r"\boxed{-5}", 0),
        ("12", r"\boxed{12\text{ cm}}", 1),
        ("104", r"\boxed{104^\circ}", 1),
        ("73", "Final Answer: **73**", 1),
        # the last number of a reply without a box
        ("46", "12 + 34 = 46.", 1),
        ("34", "12 + 34 = 46.", 0),
        ("1234", "It is 1,234.", 1),
        ("5", "7-2 = 5!", 1),
        ("-2", "5-7", 0),
        ("5", "the answer is...5", 1),
        ("5", "x5", 0),
        ("1", "1e5", 0),
        ("5", r"\boxed{3, 5}", 0),
        ("46", r"\boxed{12+34}", 0),
        ("7", "The answer is 7, because 3 + 4 = 7", 1),
        ("7", "3 + 4 = 7 apples in all.", 0),
        ("7", "3 + 4 = 7 apples.", 1),
        ("", "", None),
    ],
)
def test_the_rule_pays_exactly_the_right_answers(gold: str, reply: str, expected: float | None) -> None:
    if expected is None:
        with pytest.raises(UserError, match="must be an integer"):
            reward(gold, reply)
    else:
        assert reward(gold, reply) == expected


def test_an_empty_reply_gives_no_answer() -> None:
    task = Arithmetic()
    assert task.score(task.prompt_for_gold("5"), "").status == "no_answer"


@given(value=st.integers(-(10**30), 10**30))
@settings(max_examples=40)
def test_a_gold_is_an_integer_however_it_is_grouped(value: int) -> None:
    assert parse_gold(f"work\n#### {value:,}") == parse_gold(str(value)) == value


@pytest.mark.parametrize("gold", ["", "x", "0.5", "1/2", "50%", "1, 2", "9" * 2000])
def test_a_gold_that_is_no_integer_is_refused(gold: str) -> None:
    with pytest.raises(ValueError, match="must be an integer"):
        parse_gold(gold)
