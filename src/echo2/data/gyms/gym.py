"""A library of environments as one task: which environment is an option, or the second part of the task's name.

Invariant: ``family/environment`` and ``family`` with ``options.environment`` are the same task but for the name, so a
run can hold several environments of one library, each under its own name.
"""

from __future__ import annotations

from abc import abstractmethod

from echo2.data.task import Task
from echo2.errors import Echo2Error


class GymError(Echo2Error):
    """An environment gave no judgement; the row fails and is no zero (I4)."""


class Gym(Task):
    """Subclasses take ``environment`` as an option."""

    @classmethod
    @abstractmethod
    def environments(cls) -> list[str]:
        """Names of the environments that are installed here, sorted. Raises ConfigError without the library."""
