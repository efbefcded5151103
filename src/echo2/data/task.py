"""What a task is: prompts, an episode, a score.

Invariant (I4): a score is a judgement of a reply. Whatever raises while an episode runs or is scored makes a failed
row, never a reward of zero. ``prompt`` is a pure function of (options, split, index): a run resumes from one integer.

A new task is one file: subclass ``Task``, give it ``prompt``, ``messages`` and ``score``, and name it in a run's
configuration as ``module:Class`` or through the entry-point group ``echo2.tasks``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypedDict

import msgspec

from echo2.data.attempts import Metric
from echo2.errors import UserError
from echo2.types import Prompt

Split = Literal["train", "eval"]


class Message(TypedDict):
    role: str
    content: str


SAME_REWARD = 1e-6
"""Relative, and absolute around zero: sums of floats round differently from machine to machine."""

Played = tuple[Prompt, float, Mapping[str, Any]]
"""A prompt, the reward an episode of it got, and its Ω."""


class Score(msgspec.Struct, frozen=True):
    reward: float
    status: str
    """`correct`, `wrong`, `no_answer`, or a word of the task's own."""


class Episode(msgspec.Struct, frozen=True):
    """How an episode ended; the tokens are in the talk."""

    score: Score
    omega: dict[str, Any] = {}
    """Ω: what the objective or a report needs, msgpack types only."""
    normalisation_key: str | None = None
    """Advantages are normalised over the batch's records of one key; None means the group."""


class Talk(Protocol):
    """A conversation with the policy. Tokens are only ever appended, so each turn extends the last exactly (B03)."""

    async def say(self, messages: Sequence[Message]) -> str:
        """Add messages (all that happened since the policy's last turn) and return the policy's reply."""
        ...

    def recite(self, messages: Sequence[Message], reply: str) -> None:
        """Add messages and a reply that somebody else gave to them, to be trained on as off-policy data."""
        ...

    @property
    def position(self) -> int:
        """Which trajectory of its group this is, from 0."""
        ...


class Task(ABC):
    """Subclasses take their options as keyword arguments of ``__init__`` and raise ConfigError for wrong ones."""

    name: str = ""
    """Set by the registry to what the task is called in the configuration."""
    options: Mapping[str, Any] = MappingProxyType({})
    """The options it was made with; set by the registry."""
    pass_reward: ClassVar[float | None] = None
    """Reward from which a reply passes, for pass@k; None where there is no such thing."""

    verifiable: bool = True
    """Whether a score follows from prompt and replies alone, on every machine; False where chance, time or somebody
    else has a say. Then the coordinator scores a sample of the workers' replies again, those of single turns, and
    ``echo2 task check`` plays episodes of several."""

    @property
    def metric(self) -> Metric:
        """What the task is reported by."""
        return Metric("avg", 1)

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Distinct prompts of the split; None where they are endless. Raises ConfigError for bad data."""

    @abstractmethod
    def prompt(self, split: Split, index: int) -> Prompt:
        """Prompt ``index`` (0 ≤ index < size), complete: a worker needs no data of its own to run and score it."""

    @abstractmethod
    def messages(self, prompt: Prompt) -> list[Message]:
        """The conversation that opens the episode."""

    @abstractmethod
    def score(self, prompt: Prompt, reply: str) -> Score:
        """Judge a reply; whatever it raises makes the row a failure, not a zero."""

    async def judge(self, prompt: Prompt, reply: str) -> Score:
        """``score`` for asyncio. Override it, to the same effect, where judging waits for something; a plain ``score``
        is called in a thread."""
        return self.score(prompt, reply)

    def agrees(self, ours: Score, theirs: Score) -> bool:
        """Whether two machines may both be honest that judged one reply so: the rewards are equal but for rounding."""
        return math.isclose(ours.reward, theirs.reward, rel_tol=SAME_REWARD, abs_tol=SAME_REWARD)

    def gold_reply(self, prompt: Prompt) -> str | None:
        """A reply that scores full marks; None where the task has none. Self-checks and warm starts use it."""
        return None

    def gold_talk(self, prompt: Prompt) -> list[Message] | None:
        """A good episode from its opening on, replies included, for warm starts and inspection; None without one.

        Override it where ``rollout`` has several turns.
        """
        reply = self.gold_reply(prompt)
        return None if reply is None else [*self.messages(prompt), {"role": "assistant", "content": reply}]

    def prompt_for_gold(self, gold: str) -> Prompt:
        """A prompt whose right answer is ``gold``, to score a reply by hand. Raises UserError."""
        raise UserError(
            f"task {self.name} cannot make a prompt from a gold answer alone: score a reply to one of its own (--index)"
        )

    def metadata(self, prompt: Prompt, reply: str) -> dict[str, Any]:
        """Ω of a single-turn episode, beside the score's status."""
        return {}

    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        """One episode. Override for several turns; the default takes one and scores it."""
        reply = await talk.say(self.messages(prompt))
        return Episode(await self.judge(prompt, reply), self.metadata(prompt, reply))

    def fingerprint_parts(self) -> list[str]:
        """What else decides rewards, such as the versions of libraries."""
        return []

    def table(self, played: Sequence[Played], against: Sequence[Played] | None = None) -> list[dict[str, Any]]:
        """Rows that ``echo2 eval`` shows beside the mean reward, each with the same columns; none by default.

        against: another model's episodes of the same prompts, to tell what this one has more.
        """
        return []

    def judging_modules(self) -> Sequence[str]:
        """Names of the modules whose source decides rewards, beside those of the task's own classes."""
        return ()

    def fingerprint(self) -> str:
        """What two machines must share to run and score a prompt alike: name, options, code.

        Data is not part of it: prompts carry their own, and a distant worker need not hold the file.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([self.name, dict(self.options)], sort_keys=True, default=str).encode())
        for kind in type(self).__mro__:
            if kind is not object:
                digest.update(f"\n{kind.__qualname__}\n".encode() + _source(kind.__module__))
        for module_name in self.judging_modules():
            digest.update(f"\n{module_name}\n".encode() + _source(module_name))
        digest.update(json.dumps(self.fingerprint_parts()).encode())
        return digest.hexdigest()


@cache
def _source(module_name: str) -> bytes:
    """Source bytes of a module, line ends aside; its name where there is no source."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # __main__ has none
        spec = None
    path = None if spec is None else spec.origin
    if path is None or not Path(path).is_file():
        return module_name.encode()
    return Path(path).read_bytes().replace(b"\r\n", b"\n")
