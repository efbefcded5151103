from __future__ import annotations

import math
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from echo2.data import given
from echo2.data.task import Episode, Score
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.errors import ConfigError, TaskFault
from echo2.types import Prompt


class Odd(Arithmetic):
    """Gives what the test says, or raises it."""

    name = "odd"
    answer: Any = None

    def _said(self, *asked: object) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    size = prompt = messages = gold_reply = gold_talk = score = table = agrees = _said  # type: ignore[assignment]


def odd(answer: object) -> Odd:
    task = Odd()
    task.answer = answer
    return task


PROMPT = Prompt("odd/train/0", "odd", {"question": "1+1", "gold": "2"})
ASKED: dict[str, Callable[[Odd], object]] = {
    "size": lambda task: given.size(task, "train"),
    "prompt": lambda task: given.prompt(task, "train", 7),
    "messages": lambda task: given.messages(task, PROMPT),
    "gold_reply": lambda task: given.gold_reply(task, PROMPT),
    "gold_talk": lambda task: given.gold_talk(task, PROMPT),
    "score": lambda task: given.score(task, PROMPT, "2"),
    "table": lambda task: given.table(task, []),
    "agrees": lambda task: given.agrees(task, Score(1.0, ""), Score(1.0, "")),
}


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("error", [KeyError("a field"), SystemExit(0), GeneratorExit(), RecursionError("deep")])
def test_whatever_a_task_raises_is_a_fault_that_names_kind_and_place(what: str, error: BaseException) -> None:
    with pytest.raises(TaskFault) as caught:
        ASKED[what](odd(error))
    said = str(caught.value)
    assert type(error).__name__ in said and f"{__file__}, line " in said
    assert "odd" in said


@pytest.mark.parametrize("what", ASKED)
def test_ctrl_c_and_a_tasks_own_words_to_its_user_pass(what: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        ASKED[what](odd(KeyboardInterrupt()))
    if what != "score":  # which adds that the row fails
        with pytest.raises(ConfigError, match=r"^path must name a file$"):
            ASKED[what](odd(ConfigError("path must name a file")))


@pytest.mark.parametrize(
    ("what", "answer", "words"),
    [
        ("size", -1, "as a number or None, got int -1"),
        ("size", "many", "as a number or None, got str 'many'"),
        ("size", True, "as a number or None, got bool True"),
        ("prompt", None, "prompt train/7 as a Prompt, got None"),
        ("prompt", {"a": 1}, "prompt train/7 as a Prompt, got dict"),
        ("prompt", Prompt("p", "other", {}), "bear its name, got str 'other' in p"),
        ("messages", None, "messages of odd/train/0 as a list of at least one, got None"),
        ("messages", [], "as a list of at least one, got list"),
        ("messages", "hello", "as a list of at least one, got str"),
        ("messages", [{"content": "x"}], "with texts as role and content, got dict"),
        ("messages", [{"role": "user", "content": 5}], "with texts as role and content, got dict"),
        ("gold_reply", 5, "as a text or None, got int 5"),
        ("gold_talk", "hello", "as a list of at least one"),
        ("table", [{"a": 1}, {"b": 2}], "the same columns"),
        ("table", [{}], "as a list of rows"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(what: str, answer: object, words: str) -> None:
    with pytest.raises(TaskFault, match=r"^task odd must give ") as caught:
        ASKED[what](odd(answer))
    assert words in str(caught.value)


def test_a_call_that_does_not_fit_is_told_without_a_place_in_our_own_code() -> None:
    class Deaf(Arithmetic):
        def prompt(self) -> Prompt:  # type: ignore[override]
            return PROMPT

    with pytest.raises(TaskFault, match=r"takes 1 positional argument but 3 were given$"):
        given.prompt(Deaf(), "train", 0)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (math.nan, "must be finite, got nan"),
        (math.inf, "must be finite, got inf"),
        (np.float32("-inf"), "must be finite, got -inf"),
        ("1.0", "must be a number, got str '1.0'"),
        ("good", "must be a number, got str 'good'"),
        (True, "must be a number, got bool True"),
        (np.True_, "must be a number, got bool"),
        (None, "must be a number, got None"),
        (1j, "must be a number, got complex 1j"),
        ([1.0], "must be a number, got list"),
        (10**400, "must be a number, got int 1000"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_none(reward: object, words: str) -> None:
    with pytest.raises(TaskFault, match=r"^a reward ") as caught:
        given.checked(Score(reward, "x"))  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize("reward", [1, 1.0, np.float32(1.0), np.int64(1), Fraction(1)])
def test_numbers_of_any_library_are_rewards(reward: Any) -> None:
    found = given.checked(Score(reward, "x"))
    assert type(found.reward) is float and found.reward == 1.0


@pytest.mark.parametrize("score", [None, 1.0, (1.0, "x"), True])
def test_what_is_no_score_is_told_with_its_cure(score: object) -> None:
    with pytest.raises(TaskFault, match=r"a score must be a Score, got .*; return Score\(reward, status\)"):
        given.checked(score)


def test_a_score_that_would_have_to_be_awaited_is_told_with_its_cure() -> None:
    async def score() -> Score:
        return Score(1.0, "x")

    with pytest.raises(TaskFault, match="got a coroutine; make it judge"):
        given.checked(score())


@pytest.mark.parametrize("status", [None, 3, {"a": object()}, "x" * 201])
def test_a_status_is_a_word(status: object) -> None:
    with pytest.raises(TaskFault, match="a status must be a text of at most 200 characters"):
        given.checked(Score(1.0, status))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("episode", "words"),
    [
        (None, "an episode must end in an Episode, got None"),
        (Score(1.0, "x"), "an episode must end in an Episode, got Score"),
        (Episode(Score(math.nan, "x")), "a reward must be finite"),
        (Episode(Score(1.0, "x"), []), "omega of an episode must be a dict"),  # type: ignore[arg-type]
        (Episode(Score(1.0, "x"), {}, 3), "normalisation key must be a text or None"),  # type: ignore[arg-type]
    ],
)
def test_an_episode_is_looked_at_whole(episode: object, words: str) -> None:
    with pytest.raises(TaskFault, match=words):
        given.checked_episode(episode)


def test_a_value_that_cannot_even_be_shown_is_named_by_its_kind() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise ValueError("no")

    with pytest.raises(TaskFault, match="got Shy something whose repr raised ValueError"):
        given.checked(Shy())


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_copy_that_a_scorer_leaves_behind_ends_before_it_goes_on_as_a_second_program() -> None:
    import os

    class Forking(Arithmetic):
        def score(self, prompt: Prompt, reply: str) -> Score:
            self.child = os.fork()
            return super().score(prompt, reply)

    task = Forking()
    assert given.score(task, PROMPT, "2").reward == 1.0
    assert os.waitpid(task.child, 0)[1] == 0
