from __future__ import annotations

import pytest

from echo2.config.sections import TaskSection
from echo2.data.inspect import check
from echo2.data.registry import load_task
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.errors import ConfigError


def questions(task: Arithmetic, split: str, count: int) -> list[str]:
    return [task.prompt(split, index).content["question"] for index in range(count)]  # type: ignore[arg-type]


def test_prompts_follow_from_options_split_and_index() -> None:
    assert questions(Arithmetic(seed=3), "train", 20) == questions(Arithmetic(seed=3), "train", 20)
    assert questions(Arithmetic(seed=3), "train", 20) != questions(Arithmetic(seed=4), "train", 20)


@pytest.mark.parametrize("largest", [7, 9, 20])
def test_no_evaluated_problem_is_ever_trained_on(largest: int) -> None:
    task = Arithmetic(max_operand=largest)
    train, held_out = set(questions(task, "train", 6_000)), set(questions(task, "eval", 6_000))
    assert not train & held_out
    assert len(train | held_out) == (largest + 1) ** 2
    assert len(held_out) == (largest + 1) ** 2 // 8


def test_a_handful_of_problems_is_shared_by_both_splits() -> None:
    task = Arithmetic(max_operand=3)
    assert set(questions(task, "train", 500)) == set(questions(task, "eval", 500))


def test_every_gold_reply_scores_one() -> None:
    task = load_task(
        TaskSection(name="arithmetic", options={"operations": ["add", "subtract", "multiply"], "max_operand": 99})
    )
    result = check(task, 200)
    assert result.passed
    assert result.checked == 200
    assert not check(task, 0).passed


def test_styles_ask_in_words_or_symbols() -> None:
    words, symbols = Arithmetic(seed=1), Arithmetic(seed=1, style="symbols")
    question = words.prompt("train", 0).content["question"]
    assert words.messages(words.prompt("train", 0))[0]["content"] == (
        f"What is {question}? Answer with the number only."
    )
    assert symbols.messages(symbols.prompt("train", 0)) == [{"role": "user", "content": f"{question}="}]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_operand": -1}, "max_operand must be an integer"),
        ({"max_operand": "9"}, "max_operand must be an integer"),
        ({"min_operand": 5, "max_operand": 4}, "at most max_operand"),
        ({"operations": ["divide"]}, "operations must be"),
        ({"operations": []}, "operations must be"),
        ({"style": "loud"}, "style must be"),
        ({"max_operands": 9}, "did you mean max_operand"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_task(TaskSection(name="arithmetic", options=options))
