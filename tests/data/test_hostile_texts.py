"""Replies that are long in the wrong way: reading one must take time in proportion to its length, not to its square.

A regular expression keeps the interpreter to itself, so a reply that is slow to read would stop a worker's heartbeats.
"""

from __future__ import annotations

import time

import pytest

from echo2.data.maths import exact
from echo2.data.maths.extract import find_answer
from echo2.data.maths.plain import read
from echo2.data.sandbox.replies import action_text

LONG = 100_000
AT_MOST_S = 10.0
"""What takes the square of its length takes minutes at this one; what does not, less than a second."""

RUNS = (
    " ", "\n", "\t", "a", "5", ",111", "{", "}", "\\", "\\boxed{", "\\boxed", "answer ", "answer:", "####", "$", "\\(",
        ". ", ", ", "A. ", " because", "**", "-", "…", "..", "action", "action:", "Action: call\n", "\0",
    "é", "1/", "1.",
        "\\frac{1}{", "e9", "%", "'", "<think>", "</think>", "\u2212", "a ", "`", ":", "\r\n", "\r")  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("frame", ["{}", "{};", "Answer: 5{}x", "The answer is {};", "so 5 {};", "action {};", "5{}é"])
def test_reading_a_reply_takes_time_in_proportion_to_its_length(run: str, frame: str) -> None:
    text = frame.replace("{}", run * (LONG // len(run)))
    began_s = time.process_time()
    find_answer(text)
    find_answer(text, bare_number=True)
    action_text(text)
    assert time.process_time() - began_s < AT_MOST_S


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("frame", ["{}", "5{};", "\\text{{}", "5 cm{}m", "({})", "a b{};", "\\frac{5{}}{6}"])
def test_comparing_an_answer_of_the_greatest_length_takes_no_time_to_speak_of(run: str, frame: str) -> None:
    answer = frame.replace("{}", run * (exact.MAX_ANSWER_CHARS // len(run)), 1)[: exact.MAX_ANSWER_CHARS]
    began_s = time.process_time()
    for gold in ("5", "x+1", "no solution"):
        exact.compare(gold, answer)
    exact.compare("A", answer, "choice")
    read(answer)
    assert time.process_time() - began_s < AT_MOST_S
