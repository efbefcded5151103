"""Every gold answer of GSM8K in the forms a model writes it. Set ECHO2_GSM8K to a folder with its JSONL files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echo2.config.sections import TaskSection
from echo2.data.inspect import check
from echo2.data.registry import load_task
from echo2.data.task import Task
from echo2.types import Prompt

FOLDER = os.environ.get("ECHO2_GSM8K", "")
ROWS = 7_473 + 1_319

pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="ECHO2_GSM8K names no folder with train.jsonl and test.jsonl"),
    pytest.mark.timeout(600),
]


def written(gold: str) -> list[str]:
    """Replies that give ``gold``, an integer as digits."""
    number = int(gold)
    sign, digits = ("-" if number < 0 else ""), str(abs(number))
    return [
        rf"So it is \boxed{{{gold}}}.",
        rf"\boxed{{{number:,}}}",
        rf"\boxed{{{f'{number:,}'.replace(',', '{,}')}}}",
        rf"$$\boxed{{{sign}\${digits}}}$$",
        rf"\[ \boxed{{{gold} \text{{ dollars}}}} \]",
        rf"\boxed{{{gold}.00}}",
        rf"\boxed{{{sign}0{digits}}}",
        rf"\boxed{{x = {gold}}}",
        f"First I thought it was \\boxed{{{number + 1}}}. No: \\boxed{{{gold}}}",
        f"#### {number:,}",
        f"**Final Answer:** {number:,}",
        f"The answer is {gold} apples.",
        f"Answer: ${gold}$",
        f"Answer: \u2212{digits}" if number < 0 else f"Answer: +{digits}",
    ]


def changed(gold: str) -> list[str]:
    """Replies that give something else."""
    number = int(gold)
    others = {number + 1, number * 10 + 7, -number if number else 3}
    return [rf"\boxed{{{other}}}" for other in others] + [
        rf"\boxed{{{gold}.5}}",
        rf"\boxed{{\frac{{{gold}}}{{7}}}}" if number else r"\boxed{\frac{1}{7}}",
        rf"\boxed{{{gold}}} is wrong, it is \boxed{{{number - 1}}}",
        f"Answer: {gold}1",
        f"It may well be {gold} but I am not",
        "",
    ]


def tasks() -> list[Task]:
    options = {"path": str(Path(FOLDER) / "train.jsonl"), "eval_path": str(Path(FOLDER) / "test.jsonl")}
    return [load_task(TaskSection(name=name, options=options)) for name in ("maths", "integer_answers")]


def prompts(task: Task) -> list[Prompt]:
    return [task.prompt(split, i) for split in ("train", "eval") for i in range(task.size(split) or 0)]  # type: ignore[arg-type]


def test_every_gold_scores_one_as_models_write_it_and_a_changed_one_zero() -> None:
    maths, integers = tasks()
    both = list(zip(prompts(maths), prompts(integers), strict=True))
    assert len(both) == ROWS
    assert maths.excluded == integers.excluded == []  # type: ignore[attr-defined]
    missed, paid = [], []
    for prompt, same in both:
        gold = prompt.content["gold"].replace(",", "")
        for task, asked in ((maths, prompt), (integers, same)):
            missed += [(gold, reply) for reply in written(gold) if task.score(asked, reply).reward != 1.0]
            paid += [(gold, reply) for reply in changed(gold) if task.score(asked, reply).reward != 0.0]
    assert (missed[:5], paid[:5]) == ([], [])


def test_every_gold_reply_scores_one() -> None:
    for task in tasks():
        found = [check(task, ROWS, split=split) for split in ("train", "eval")]  # type: ignore[arg-type]
        assert sum(one.checked for one in found) == ROWS
        assert all(one.passed for one in found)
