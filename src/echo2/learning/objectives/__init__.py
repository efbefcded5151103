"""The objectives a configuration can name; each is one short module with its paper and its deviations."""

from __future__ import annotations

from echo2.errors import ConfigError
from echo2.learning.objectives.grpo import grpo
from echo2.learning.objectives.grpo_paper import grpo_paper
from echo2.learning.objectives.terms import Objective, ObjectiveSettings, ObjectiveSums, TokenTerms

OBJECTIVES: dict[str, Objective] = {"grpo": grpo, "grpo_paper": grpo_paper}

__all__ = ["OBJECTIVES", "Objective", "ObjectiveSettings", "ObjectiveSums", "TokenTerms", "find_objective"]


def find_objective(name: str) -> Objective:
    """Raises ConfigError for a name that is not registered."""
    if name not in OBJECTIVES:
        raise ConfigError(f"learning.objective must be one of {', '.join(OBJECTIVES)}, got {name!r}")
    return OBJECTIVES[name]
