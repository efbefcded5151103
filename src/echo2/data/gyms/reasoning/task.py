"""Every environment of reasoning-gym as a task: problems made from a number, judged by the library's own scorers.

Invariant: a prompt carries its problem whole, so a worker makes nothing up; the answer is found by one rule, which the
prompt states: what stands between the last ``<answer>`` and the ``</answer>`` after it. Only that is given to the
library, whose scorers pay in part for a reply that holds the right answer somewhere.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from echo2.data.gyms.gym import Gym, GymError
from echo2.data.gyms.reasoning.library import library
from echo2.data.gyms.reasoning.messages import Check, Judge, Make, Names
from echo2.data.task import Message, Score, Split
from echo2.errors import ConfigError, UserError
from echo2.types import Prompt

OPENING, CLOSING = "<answer>", "</answer>"
MAX_ANSWER_CHARS = 16_384
"""The longest right answers, boards of a thousand cells, have a quarter of it."""
INSTRUCTION = f"Think first. Then write the final answer, and nothing else, between {OPENING} and {CLOSING}."


def find_answer(reply: str) -> str | None:
    """What stands in the last closed pair of tags; None where there is none or nothing in it."""
    end = reply.rfind(CLOSING)
    start = reply.rfind(OPENING, 0, end) if end >= 0 else -1
    return reply[start + len(OPENING) : end].strip() or None if start >= 0 else None


class ReasoningGym(Gym):
    """environment: its name in reasoning-gym.  config: its own options, all but ``seed`` and ``size``.

    seed: which problems come.  threshold: a score from which on the reward is 1, and 0 below; without one the reward is
    the library's score, which may be a part of 1.  instruction: appended to each question; it must show both tags.
    """

    pass_reward = 1.0

    def __init__(
        self,
        *,
        environment: str,
        config: dict[str, Any] | None = None,
        seed: int = 0,
        threshold: float | None = None,
        instruction: str = INSTRUCTION,
    ) -> None:
        faults = []
        if not isinstance(config or {}, dict) or {"seed", "size"} & (config or {}).keys():
            faults.append(f"config must be a table without seed and size, got {config!r}; seed is an option beside it")
        if not isinstance(seed, int) or isinstance(seed, bool):
            faults.append(f"seed must be an integer, got {seed!r}")
        if threshold is not None and not (isinstance(threshold, int | float) and 0 < threshold <= 1):
            faults.append(f"threshold must be a number in (0, 1], got {threshold!r}")
        if not isinstance(instruction, str) or OPENING not in instruction or CLOSING not in instruction:
            faults.append(f"instruction must show {OPENING} and {CLOSING}, got {instruction!r}")
        if faults:
            raise ConfigError([f"reasoning_gym: {fault}" for fault in faults])
        self._environment, self._config, self._seed = environment, config or {}, seed
        self._threshold, self._instruction = threshold, instruction
        known = self.environments()
        if environment not in known:
            near = difflib.get_close_matches(str(environment), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"reasoning_gym has no environment {environment!r}{hint} (echo2 task list reasoning_gym names all)"
            )
        fault = library().ask(Check(environment, self._config))
        if fault is not None:
            raise ConfigError(f"reasoning_gym: config must suit {environment}, got {self._config!r}: {fault}")

    @classmethod
    def environments(cls) -> list[str]:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("reasoning_gym: reasoning-gym must be installed; pip install 'echo2[gyms]'")
        try:
            names: list[str] = library().ask(Names())
        except GymError as error:
            raise ConfigError(f"reasoning_gym: the library must load here: {error}") from error
        return names

    def size(self, split: Split) -> int | None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        try:
            problem = library().ask(Make(self._environment, self._config, self._seed, split == "eval", index))
        except GymError as error:
            raise UserError(f"task {self.name} must give prompt {split}/{index}: {error}") from error
        return Prompt(f"{self.name}/{split}/{index}", self.name, problem)

    def messages(self, prompt: Prompt) -> list[Message]:
        return [{"role": "user", "content": f"{prompt.content['question']}\n\n{self._instruction}"}]

    def score(self, prompt: Prompt, reply: str) -> Score:
        answer = find_answer(reply)
        if answer is None:
            return Score(0.0, "no_answer")
        if len(answer) > MAX_ANSWER_CHARS:
            return Score(0.0, "too_long")
        problem = {key: prompt.content[key] for key in ("question", "answer", "metadata")}
        value = library().ask(Judge(self._environment, self._config, problem, answer))
        if self._threshold is not None:
            value = float(value >= self._threshold)
        return Score(value, "correct" if value == 1.0 else "partial" if value > 0.0 else "wrong")

    def gold_reply(self, prompt: Prompt) -> str | None:
        gold = prompt.content["gold"]
        return None if gold is None else f"{OPENING}{gold}{CLOSING}"

    def judging_modules(self) -> Sequence[str]:
        return [f"echo2.data.gyms.reasoning.{name}" for name in ("guards", "plain", "problems", "process")]

    def fingerprint_parts(self) -> list[str]:
        return [metadata.version(name) for name in ("reasoning-gym", "sympy")]
