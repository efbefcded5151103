from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echo2.config.sections import TaskSection
from echo2.data.registry import load_task, load_tasks, task_names
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.errors import ConfigError


def test_built_in_tasks_are_known_by_name() -> None:
    assert {"arithmetic", "integer_answers", "maths", "aime24", "imo_answer_400"} <= set(task_names())


def test_a_task_is_found_by_module_and_class() -> None:
    name = "echo2.data.tasks.arithmetic:Arithmetic"
    task = load_task(TaskSection(name=name, options={"max_operand": 5}))
    assert isinstance(task, Arithmetic)
    assert task.prompt("train", 0).task == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("arithmetics", "did you mean arithmetic"),
        ("no.such.module:Task", "must be importable"),
        ("echo2.data.tasks.arithmetic:Nothing", "must be importable"),
        ("echo2.types:Policy", "subclass of"),
    ],
)
def test_an_unknown_task_is_a_configuration_fault(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_task(TaskSection(name=name))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def broken(:\n", r"importable here: faulty raised SyntaxError: .*faulty\.py, line 1"),
        ("import sys\nsys.exit(0)\n", r"importable here: faulty raised SystemExit: 0 \(.*faulty\.py, line 2\)"),
        ("x = {}['missing']\n", r"importable here: faulty raised KeyError: 'missing' \(.*faulty\.py, line 1\)"),
        (
            "from echo2.data.tasks.arithmetic import Arithmetic\n"
            "class Task(Arithmetic):\n    def __init__(self):\n        1 / 0\n",
            r"faulty:Task must take its options, it raised ZeroDivisionError: .*faulty\.py, line 4\)",
        ),
    ],
)
def test_a_task_file_that_raises_is_named_with_its_line(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    with pytest.raises(ConfigError, match=words):
        load_task(TaskSection(name="faulty:Task"))
    sys.modules.pop("faulty", None)


def test_two_tasks_of_one_name_are_refused() -> None:
    twice = [TaskSection(name="arithmetic"), TaskSection(name="arithmetic", options={"max_operand": 3})]
    with pytest.raises(ConfigError, match="called differently, got arithmetic twice; give each a label"):
        load_tasks(twice)


def test_tasks_of_one_kind_are_told_apart_by_their_labels() -> None:
    tasks = load_tasks(
        [
            TaskSection(name="arithmetic", label="small", options={"max_operand": 3}),
            TaskSection(name="arithmetic", label="large", options={"min_operand": 90, "max_operand": 99}),
            TaskSection(name="arithmetic"),
        ]
    )
    assert list(tasks) == [task.name for task in tasks.values()] == ["small", "large", "arithmetic"]
    prompts = [task.prompt("train", 0) for task in tasks.values()]
    assert [prompt.task for prompt in prompts] == list(tasks)
    assert len({prompt.prompt_id for prompt in prompts}) == 3
    assert len({task.fingerprint() for task in tasks.values()}) == 3


def test_fingerprints_tell_options_apart_and_agree_otherwise() -> None:
    def fingerprint(**options: object) -> str:
        return load_task(TaskSection(name="arithmetic", options=options)).fingerprint()

    assert fingerprint(max_operand=9) == fingerprint(max_operand=9)
    assert fingerprint(max_operand=9) != fingerprint(max_operand=8)
