from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.data.maths.extract import find_answer
from echo2.data.maths.plain import read


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{5} no, \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox {5}", "5"),
        (r"\boxed{5}, or better \boxed{7", "5"),
        (r"\boxed{5} and then \boxed{}", None),
        (r"\boxed{" + "x+" * 300 + "1}", "x+" * 300 + "1"),
        ("Answer: 5\nThat was easy.", "5"),
        ("**Final Answer:** $\\sqrt{2}$, as we saw", r"\sqrt{2}"),
        ("Final Answer: **73**", "73"),
        ("## Final answer:\n\n 73", "73"),
        ("work\n#### 1,234", "1,234"),
        ("The final answer is 7. I hope it is correct.", "7"),
        ("The answer is 7 because 3 + 4 = 7", "7"),
        ("the answer is...5", "5"),
        ("Answer: 5\nAnswer: 7", "7"),
        (r"Answer: 5, that is \boxed{7}", "7"),
        (r"The answer is \(x^2\).", "x^2"),
        ("I think 25 is plausible but", None),
        ("The sum is 25", None),
        ("", None),
    ],
)
def test_one_rule_finds_the_answer(reply: str, answer: str | None) -> None:
    assert find_answer(reply) == answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("12 + 34 = 46.", "46"),
        ("It is 1,234 apples.", "1,234"),
        ("It is 1{,}234", "1,234"),
        ("about 50%", "50%"),
        ("7-2 = 5!", "5"),
        (r"so \frac{10}{2}", "10/2"),
        ("It is \u22125.", "-5"),
        ("I think 25 is plausible but", None),
        ("x5", None),
        ("1e5", None),
        (r"\boxed{4} and 5", "4"),
        ("Answer: 4, not 5", "4, not 5"),
        ('The answer is "x". So x = 5', "5"),
    ],
)
def test_a_reply_to_a_prompt_for_a_bare_number_may_end_with_it(reply: str, answer: str | None) -> None:
    assert find_answer(reply, bare_number=True) == answer


@given(value=st.integers(-(10**30), 10**30), before=st.sampled_from(["", "so ", "= ", "**", "$"]))
@settings(max_examples=80)
def test_any_integer_is_found_however_it_is_grouped(value: int, before: str) -> None:
    for text in (f"{before}{value}.", f"{before}{value:,}", rf"\boxed{{{value:,}}}", f"Answer: {value}"):
        found = find_answer(text, bare_number=True)
        plain = read(found) if found else None
        assert plain is not None and plain.numbers[0].value == value


@given(st.text(max_size=200), st.booleans())
@settings(max_examples=80)
def test_no_text_makes_the_rule_fail(text: str, bare: bool) -> None:
    find_answer(text, bare_number=bare)


@pytest.mark.parametrize(
    "text",
    ["9" * 30_000, r"\boxed{" * 5_000, "1,111" * 5_000, "{}" * 10_000, "1/" * 10_000, "answer: " * 5_000, "$" * 20_000,
     r"\(" * 10_000, "Answer:" + " so" * 10_000, "5" + " a" * 10_000, "Answer: " + "*" * 20_000],
)  # fmt: skip
def test_hostile_replies_cost_little(text: str) -> None:
    started = time.process_time()
    found = find_answer(text, bare_number=True)
    if found:
        read(found)
    assert time.process_time() - started < 2.0
