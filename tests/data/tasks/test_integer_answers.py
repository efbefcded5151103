from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from echo2.data.inspect import check
from echo2.data.tasks.integer_answers import IntegerAnswers
from echo2.errors import ConfigError


def write_rows(path: Path, rows: Sequence[object]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_gsm8k_rows_are_understood_and_gold_replies_score_one(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"some work\n#### {i},000"} for i in range(1, 31)]
    task = IntegerAnswers(path=write_rows(tmp_path / "rows.jsonl", rows))
    assert (task.size("train"), task.size("eval")) == (27, 3)
    assert task.prompt("eval", 0).content["gold"] == "10000"
    assert check(task, 100).checked == 27
    assert check(task, 100).passed
    assert task.messages(task.prompt("train", 0))[0]["content"].startswith("q1\n\n")


def test_bad_rows_are_excluded_and_counted_with_their_line(tmp_path: Path) -> None:
    """A05 (c): an unparsable gold is never a prompt."""
    rows = [
        {"question": "fine", "answer": 4},
        {"question": "no answer"},
        {"question": "bad gold", "answer": ""},
        "not json",
        [1],
        {"question": "half", "answer": 0.5},
        {"question": "true", "answer": True},
        {"question": "also fine", "answer": "-7"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    task = IntegerAnswers(path=path)
    assert task.size("train") == 2
    assert [entry.line for entry in task.excluded] == [2, 3, 4, 5, 6, 7]
    assert str(task.excluded[1]) == f"{path}, row 3: a gold answer must be an integer, got ''"
    assert "'answer' must be a text or a number, got None (fields: ['question'])" in str(task.excluded[0])


def test_fields_and_a_held_out_file_are_configurable(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.jsonl", [{"problem": "p", "gold": 1}])
    held_out = write_rows(tmp_path / "b.jsonl", [{"problem": "h", "gold": 2}, {"problem": "i", "gold": 3}])
    task = IntegerAnswers(path=train, eval_path=held_out, question_field="problem", answer_field="gold", instruction="")
    assert (task.size("train"), task.size("eval")) == (1, 2)
    assert task.messages(task.prompt("eval", 1)) == [{"role": "user", "content": "i"}]


def test_unusable_files_are_configuration_faults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"readable file, got '.*missing\.jsonl': No such file"):
        IntegerAnswers(path=str(tmp_path / "missing.jsonl")).size("train")
    wrong = write_rows(tmp_path / "wrong.jsonl", [{"q": 1}])
    with pytest.raises(ConfigError, match=r"none; the first fault: .*wrong\.jsonl, row 1: field 'question'"):
        IntegerAnswers(path=wrong).size("train")
    with pytest.raises(ConfigError, match="path must name"):
        IntegerAnswers().size("train")
    with pytest.raises(ConfigError, match="eval_every"):
        IntegerAnswers(path="x", eval_every=1)


def test_a_worker_scores_without_the_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "q", "answer": 5}] * 2)
    prompt = IntegerAnswers(path=path).prompt("train", 0)
    elsewhere = IntegerAnswers(path="/nowhere/rows.jsonl")
    assert elsewhere.score(prompt, "It is 5.").reward == 1.0
