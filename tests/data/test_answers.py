from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.data.answers import find_answer, parse_gold
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


@given(value=st.integers(-(10**30), 10**30), before=st.sampled_from(["", "so ", "= ", "**", "$"]))
@settings(max_examples=80, deadline=None)
def test_any_integer_is_found_however_it_is_grouped(value: int, before: str) -> None:
    assert find_answer(f"{before}{value}.") == value
    assert find_answer(f"{before}{value:,}") == value
    assert parse_gold(f"work\n#### {value:,}") == value


@given(st.text(max_size=200))
@settings(max_examples=80, deadline=None)
def test_no_text_makes_the_rule_fail(text: str) -> None:
    find_answer(text)


@pytest.mark.parametrize("text", ["9" * 30_000, r"\boxed{" * 5_000, "1,111" * 5_000, "{}" * 10_000, "1/" * 10_000])
def test_hostile_replies_cost_little(text: str) -> None:
    started = time.process_time()
    find_answer(text)
    assert time.process_time() - started < 2.0
