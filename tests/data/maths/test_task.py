from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from echo2.config.sections import TaskSection
from echo2.data.inspect import check
from echo2.data.maths.task import Maths
from echo2.data.registry import load_task
from echo2.data.task import Task
from echo2.errors import ConfigError

pytestmark = pytest.mark.timeout(300)


def write_rows(path: Path, rows: Sequence[object]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def load(name: str, **options: Any) -> Task:
    return load_task(TaskSection(name=name, options=options))


def test_rows_become_prompts_whose_gold_replies_score_one(tmp_path: Path) -> None:
    golds = ["7", r"\sqrt{2}", r"\frac{n(n+1)}{2}", r"(-\infty, 3]", "Yes", r"\{1, 2\}", "so\n#### 1,000", r"\boxed{5}"]
    rows = [{"problem": f"p{n}", "answer": gold} for n, gold in enumerate(golds)]
    task = load("maths", path=write_rows(tmp_path / "rows.jsonl", rows), eval_every=4)
    assert (task.size("train"), task.size("eval")) == (6, 2)
    assert task.prompt("eval", 1).content == {"question": "p7", "gold": "5", "kind": "expression", "row": 8}
    assert task.messages(task.prompt("train", 0))[0]["content"].startswith("p0\n\nReason step by step")
    for split in ("train", "eval"):
        assert check(task, 10, split=split).passed  # type: ignore[arg-type]


def test_bad_rows_are_excluded_and_counted_with_file_and_row(tmp_path: Path) -> None:
    """A05 (c): a gold that cannot be compared is never a prompt."""
    rows: list[object] = [
        {"problem": "fine", "answer": r"\sqrt{2}"},
        {"problem": "no answer"},
        {"answer": "3"},
        {"problem": "empty", "answer": ""},
        {"problem": "broken", "answer": r"\frac{"},
        {"problem": "prose", "answer": "all integers n that are not divisible by three"},
        {"problem": "endless", "answer": r"\binom{1000000000}{500000000}+x"},
        "not json",
        {"problem": "long", "answer": "x" * 5000},
        {"problem": "also fine", "answer": 2.5},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    task = Maths(path=path)
    assert task.size("train") == 2
    assert sorted(entry.line for entry in task.excluded) == [2, 3, 4, 5, 6, 7, 8, 9]
    told = "\n".join(map(str, task.excluded))
    assert f"{path}, row 2: field answer or gold or Answer or final_answer must be a text or a number, got None" in told
    assert f"{path}, row 5: the gold answer '\\\\frac{{' cannot be used: it is no expression that can be read" in told
    assert "row 6: the gold answer 'all integers n that are not divisible by three' cannot be used: it is prose" in told
    assert "row 7: " in told and "reading it takes too much time or memory" in told


def test_a_benchmark_is_held_out_whole_and_never_trained_on(tmp_path: Path) -> None:
    rows = [{"problem": f"p{n}", "answer": f"{n:03}"} for n in range(30)]
    task = load("aime24", path=write_rows(tmp_path / "aime.jsonl", rows))
    assert (task.size("train"), task.size("eval")) == (0, 30)
    assert str(task.metric) == "avg@64"
    prompt = task.prompt("eval", 7)
    assert task.score(prompt, r"\boxed{7}").reward == 1.0
    assert task.score(prompt, r"\boxed{14-7}").reward == 0.0


def test_jee_rows_are_judged_by_their_type(tmp_path: Path) -> None:
    rows = [
        {"question": "one", "gold": "B", "type": "MCQ"},
        {"question": "several", "gold": "ACD", "type": "MCQ(multiple)"},
        {"question": "whole", "gold": "3", "type": "Integer"},
        {"question": "rounded", "gold": "2.35", "type": "Numeric"},
        {"question": "odd", "gold": "1", "type": "Essay"},
    ]
    task = load("jee", path=write_rows(tmp_path / "jee.jsonl", rows))
    replies = [r"\boxed{\text{(B)}}", r"\boxed{A, C, D}", r"\boxed{3}", r"\boxed{2.36}"]
    wrong = [r"\boxed{A}", r"\boxed{AC}", r"\boxed{3.005}", r"\boxed{2.4}"]
    prompts = [task.prompt("eval", index) for index in range(4)]
    assert [task.score(prompt, reply).reward for prompt, reply in zip(prompts, replies, strict=True)] == [1.0] * 4
    assert [task.score(prompt, reply).reward for prompt, reply in zip(prompts, wrong, strict=True)] == [0.0] * 4
    assert "field type must be one of MCQ" in str(task.excluded[0])  # type: ignore[attr-defined]
    assert task.score(task.prompt_for_gold("B"), r"\boxed{(B)}").reward == 1.0


def test_training_rows_and_a_benchmark_may_be_of_different_make(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [{"prompt": "t", "final": "1"}])
    held_out = tmp_path / "imo.csv"
    held_out.write_text('Problem ID,Problem,Short Answer\n1,"What, now?",$2^{n}$\n')
    columns = {"question_field": "prompt", "answer_field": "final"}
    task = load("maths", path=train, eval_path=str(held_out), eval_preset="plain", **columns)
    with pytest.raises(ConfigError, match="first fault"):
        task.size("eval")
    held_out.write_text('prompt,final\n"What, now?",$2^{n}$\n')
    again = load("maths", path=train, eval_path=str(held_out), eval_preset="hardmath", **columns)
    assert (again.size("train"), again.size("eval")) == (1, 1)
    assert again.prompt("eval", 0).content["question"] == "What, now?"
    assert str(again.metric) == "pass@1"


def test_a_worker_scores_without_the_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"problem": "q", "answer": r"\sqrt{8}"}] * 2)
    prompt = Maths(path=path).prompt("train", 0)
    assert Maths(path="/nowhere/rows.jsonl").score(prompt, r"\boxed{2\sqrt{2}}").status == "correct"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "aime42"}, "preset must be one of plain, aime24"),
        ({"dataset": "rows.jsonl"}, "dataset must be a hub id"),
        ({"kind": "essay"}, "kind must be one of"),
        ({"eval_every": 1}, "eval_every must be"),
        ({"tolerance": -1}, "tolerance must be"),
        ({"path": 5}, "path must be a string"),
        ({"pathh": "x"}, "did you mean path"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("maths", **options)


def test_without_any_rows_a_sentence_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path must name a file of problems, or dataset a hub id"):
        load("maths").size("train")
    with pytest.raises(ConfigError, match="readable file, got '/nowhere'"):
        load("maths", path="/nowhere").size("train")
    with pytest.raises(ConfigError, match=r"at least one usable row, it holds none; the first fault: .*row 1"):
        load("maths", path=write_rows(tmp_path / "bad.jsonl", [{"q": 1}])).size("train")


def test_without_the_checker_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "math_verify" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ConfigError, match=r"math-verify, which must be installed; pip install 'echo2\[maths\]'"):
        load("maths")


def test_the_judging_code_and_its_libraries_are_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load("maths").fingerprint()
    assert load("maths").fingerprint() == before
    with monkeypatch.context() as patch:
        patch.setattr(Maths, "fingerprint_parts", lambda self: ["another version"])
        of_other_libraries = load("maths").fingerprint()
    monkeypatch.setattr(Maths, "judging_modules", lambda self: ())
    assert len({before, of_other_libraries, load("maths").fingerprint()}) == 3


def test_numbers_of_a_table_are_golds_as_they_are_and_missing_ones_are_none(tmp_path: Path) -> None:
    """A gold `nan` would be the product of three letters, `1e-07` a difference: prompts that nobody can get right."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"problem": ["a", "b", "c"], "answer": [1e-07, float("nan"), 2.0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    task = Maths(path=str(tmp_path / "a.parquet"))
    assert [row.line for row in task.excluded] == [2]
    assert "must be a finite number, got nan" in str(task.excluded[0])
    assert task.score(task.prompt("train", 0), r"\boxed{10^{-7}}").reward == 1.0
    assert task.score(task.prompt("train", 0), r"\boxed{0.0000001}").reward == 1.0
