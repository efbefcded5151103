"""ECHO-2: reinforcement-learning post-training with one learner and distant rollout workers.

Names are loaded when they are first used: ``import echo2`` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo2.config.root import Config as Config
    from echo2.data.task import Score as Score
    from echo2.data.task import Task as Task
    from echo2.metrics import StepMetrics as StepMetrics
    from echo2.run.api import Run as Run
    from echo2.run.api import RunResult as RunResult
    from echo2.run.api import train as train
    from echo2.version import VERSION as __version__

_HOME = {
    "Config": "echo2.config.root",
    "Run": "echo2.run.api",
    "RunResult": "echo2.run.api",
    "Score": "echo2.data.task",
    "StepMetrics": "echo2.metrics",
    "Task": "echo2.data.task",
    "train": "echo2.run.api",
}

__all__ = ["Config", "Run", "RunResult", "Score", "StepMetrics", "Task", "__version__", "train"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("echo2.version").VERSION
    if name not in _HOME:
        raise AttributeError(f"module echo2 has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
