"""A task for worlds in which nothing but time matters: call a coin.

Invariant: as small as a task can be, so that a simulated trajectory costs little; rewards rise with the policy's
version, as with the scripted engine's sums.
"""

from __future__ import annotations

from random import Random

from echo2.data.task import Message, Score, Split, Task
from echo2.types import Policy, Prompt

FIRST_SKILL = 0.2
SKILL_PER_VERSION = 0.01
BEST_SKILL = 0.95
NAME = f"{__name__}:Coin"
"""In a run's configuration."""


class Coin(Task):
    verifiable = False  # it would only cost the simulation time

    def size(self, split: Split) -> int | None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(f"{split}-{index}", self.name, {})

    def messages(self, prompt: Prompt) -> list[Message]:
        return [Message(role="user", content=prompt.prompt_id)]

    def score(self, prompt: Prompt, reply: str) -> Score:
        return Score(1.0, "correct") if reply == "1" else Score(0.0, "wrong")


def call(prompt: str, random: Random, policy: Policy) -> str:
    """The scripted engine's reply."""
    return "1" if random.random() < min(BEST_SKILL, FIRST_SKILL + SKILL_PER_VERSION * policy.version) else "0"
