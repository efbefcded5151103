"""The whole configuration of a run and what follows from it.

Invariant: a ``Config`` that exists is feasible: every relation between keys has been checked, in one place, with the
numbers in the sentence.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from echo2.config.feasible import infeasibilities
from echo2.config.lora import LoraSection
from echo2.config.sections import (
    BroadcastSection,
    BufferSection,
    CheckpointSection,
    CoordinatorSection,
    EvalSection,
    LearningSection,
    MetricsSection,
    ModelSection,
    PoolSection,
    ProvisioningSection,
    RehearsalSection,
    RolloutSection,
    RunSection,
    Section,
    ServerSection,
    StalenessSection,
    TaskSection,
    WorkersSection,
)
from echo2.errors import ConfigError


class Config(Section):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    tasks: tuple[TaskSection, ...] = Field(default=(TaskSection(name="arithmetic"),))
    """What is trained on; several tasks are mixed by weight."""
    rollout: RolloutSection = RolloutSection()
    server: ServerSection = ServerSection()
    staleness: StalenessSection = StalenessSection()
    learning: LearningSection = LearningSection()
    lora: LoraSection = LoraSection()
    buffer: BufferSection = BufferSection()
    checkpoint: CheckpointSection = CheckpointSection()
    broadcast: BroadcastSection = BroadcastSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    workers: WorkersSection = WorkersSection()
    provisioning: ProvisioningSection = ProvisioningSection()
    pools: tuple[PoolSection, ...] = ()
    """Where machines are activated and released; none by default."""
    eval: EvalSection = EvalSection()
    metrics: MetricsSection = MetricsSection()
    rehearsal: RehearsalSection = RehearsalSection()

    @model_validator(mode="after")
    def _feasible(self) -> Self:
        """Raises ConfigError with a sentence for every relation that does not hold."""
        if faults := infeasibilities(self):
            raise ConfigError([fault.sentence for fault in faults])
        return self

    @property
    def staleness_budget(self) -> int:
        """S of the mode."""
        return {"sync": 0, "async": 1, "echo2": self.staleness.budget}[self.run.mode]

    @property
    def publish_period(self) -> int:
        """kappa of the mode: 1 for the baselines, else the configured one, S - 1 by default."""
        if self.run.mode != "echo2":
            return 1
        return self.staleness.publish_period or self.staleness.budget - 1

    @property
    def audited_rows(self) -> int:
        """Rows per step whose log-probs are compared; 0 where the scripted engine makes them up."""
        return 0 if self.rollout.engine == "scripted" else self.learning.audit_rows

    @property
    def prompts_per_step(self) -> int:
        """P = R / n."""
        return self.rollout.rollouts_per_step // self.rollout.group_size
