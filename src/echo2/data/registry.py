"""Tasks by name: registered ones, ``family/environment`` of a gym, and ``module:Class``.

Invariant: whatever is wrong with a task's name or options is a ConfigError that says what is known instead.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePath
from typing import Any

from echo2.config.places import path_keys
from echo2.config.sections import TaskSection
from echo2.data.given import told
from echo2.data.gyms.gym import Gym
from echo2.data.imported import imported
from echo2.data.task import Task
from echo2.errors import ConfigError, UserError

ENTRY_POINT_GROUP = "echo2.tasks"

BUILT_IN = {
    "arithmetic": "echo2.data.tasks.arithmetic:Arithmetic",
    "integer_answers": "echo2.data.tasks.integer_answers:IntegerAnswers",
    "maths": "echo2.data.maths.task:Maths",
    "aime24": "echo2.data.maths.benchmarks:Aime24",
    "omnimath": "echo2.data.maths.benchmarks:OmniMath",
    "jee": "echo2.data.maths.benchmarks:Jee",
    "hardmath": "echo2.data.maths.benchmarks:HardMath",
    "imo_answer_400": "echo2.data.maths.benchmarks:ImoAnswer400",
    "sandbox": "echo2.data.sandbox.task:SandboxTask",
    "reasoning_gym": "echo2.data.gyms.reasoning.task:ReasoningGym",
    "verifiers": "echo2.data.gyms.verifiers.task:Verifiers",
}
"""Also there when the package runs from a source tree that was never installed."""


def task_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(BUILT_IN.keys() | _registered().keys())


def environment_names(family: str) -> list[str]:
    """Names of the tasks that a gym makes of its environments, sorted.

    Raises ConfigError where the family is no gym or its library is missing.
    """
    kind = _find(family)
    if not issubclass(kind, Gym):
        raise ConfigError(f"{family} must be a gym to have environments of its own; run echo2 task show {family}")
    return [f"{family}/{name}" for name in kind.environments()]


def load_tasks(sections: Sequence[TaskSection]) -> dict[str, Task]:
    """The tasks of a run by name, in order; their names must differ."""
    tasks: dict[str, Task] = {}
    for section in sections:
        if section.called in tasks:
            raise ConfigError(f"tasks must be called differently, got {section.called} twice; give each a label")
        tasks[section.called] = load_task(section)
    return tasks


def load_task(section: TaskSection) -> Task:
    """The task that a section describes, ready to give prompts. Raises ConfigError."""
    kind, options = _kind_and_options(section)
    if issubclass(kind, Gym) and "environment" not in options:
        name = section.name
        raise ConfigError(f"{name} is a gym: name an environment, {name}/NAME; echo2 task list {name} names them")
    parameters = inspect.signature(kind).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if len(known) == len(parameters):
        faults = [_unknown(section.name, key, known) for key in options if key not in known]
        needed = [p.name for p in parameters if p.default is p.empty and p.name not in options]
        faults += [f"{section.name}: option {name} must be given" for name in needed]
        if faults:
            raise ConfigError(faults)
    try:
        task = kind(**options)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a person's own code, which may even try to end the program
        raise ConfigError(f"task {section.name} must take its options, it raised {told(error)}") from error
    task.name, task.options = section.called, dict(section.options)
    return task


def load_elsewhere(section: TaskSection) -> Task | None:
    """The task as a worker on another machine makes it, where the files that its options name are not; None where they
    name none. Raises ConfigError.
    """
    keys = path_keys(section.options)
    if not keys:
        return None
    absent = {key: str(PurePath("/on-another-machine", PurePath(section.options[key]).name)) for key in keys}
    return load_task(section.model_copy(update={"options": {**section.options, **absent}}))


def _unknown(task: str, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{task} has no option {key!r}{hint} (it has {', '.join(known) or 'none'})"


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _kind_and_options(section: TaskSection) -> tuple[type[Task], dict[str, Any]]:
    family, slash, environment = section.name.partition("/")
    if not slash or ":" in section.name:
        return _find(section.name), section.options
    kind = _find(family)
    if not issubclass(kind, Gym):
        raise ConfigError(f"only a gym's environment is named family/environment, {family} is no gym: name it alone")
    if "environment" in section.options:
        raise ConfigError(f"{section.name} names its environment already; leave the option environment out")
    return kind, {"environment": environment, **section.options}


def _find(name: str) -> type[Task]:
    registered = _registered()
    target = registered[name].value if name in registered else BUILT_IN.get(name, name)
    if not target.partition(":")[2]:
        near = difflib.get_close_matches(name, task_names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"a task must be one of {', '.join(task_names())} or module:Class, got {name!r}{hint}")
    kind = imported(f"task {name}", target)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        hint = f"; a game is an option of a task: sandbox with sandbox={name}" if hasattr(kind, "reset") else ""
        raise ConfigError(f"task {name} must be a subclass of echo2.data.task.Task, got {kind!r}{hint}")
    return kind
