"""The objectives a configuration can name; each is one short module with its paper and its deviations."""

from __future__ import annotations

from echo2.config.root import Config
from echo2.errors import ConfigError
from echo2.learning.objectives.cispo import cispo
from echo2.learning.objectives.dapo import dapo
from echo2.learning.objectives.decoupled_ppo import decoupled_ppo
from echo2.learning.objectives.dppo_tv import dppo_tv
from echo2.learning.objectives.dr_grpo import dr_grpo
from echo2.learning.objectives.gepo import gepo, group_moments
from echo2.learning.objectives.grpo import grpo
from echo2.learning.objectives.grpo_paper import grpo_paper
from echo2.learning.objectives.gspo import gspo
from echo2.learning.objectives.m2po import m2po, moments
from echo2.learning.objectives.terms import Objective, ObjectiveSettings, ObjectiveSums, TokenTerms

OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(grpo),
    "grpo_paper": Objective(grpo_paper),
    "dr_grpo": Objective(dr_grpo, mean="constant"),
    "dapo": Objective(dapo),
    "gspo": Objective(gspo, mean="rows"),
    "cispo": Objective(cispo),
    "decoupled_ppo": Objective(decoupled_ppo),
    "m2po": Objective(m2po, statistics=moments),
    "gepo": Objective(gepo, mean="rows", statistics=group_moments),
    "dppo_tv": Objective(dppo_tv),
}

__all__ = [
    "OBJECTIVES",
    "Objective",
    "ObjectiveSettings",
    "ObjectiveSums",
    "TokenTerms",
    "configured",
    "find_objective",
]


def find_objective(name: str) -> Objective:
    """Raises ConfigError for a name that is not registered."""
    if name not in OBJECTIVES:
        raise ConfigError(f"learning.objective must be one of {', '.join(OBJECTIVES)}, got {name!r}")
    return OBJECTIVES[name]


def configured(config: Config) -> tuple[Objective, ObjectiveSettings]:
    """The objective a run maximises; what the configuration leaves open is the objective's own."""
    learning = config.learning
    own = {key: learning.settled(key) for key in ("clip_low", "clip_high", "truncation", "second_moment")}
    settings = ObjectiveSettings(
        **{key: value for key, value in own.items() if value is not None},
        longest_reply=config.rollout.max_new_tokens,
        kl_beta=learning.kl_beta,
        kl_estimator=learning.kl_estimator,
    )
    return find_objective(learning.objective), settings
