"""Who sits at a table: rule bots, models that answer text, and the policy that is trained.

Invariant: a player sees the states of its own seat only. A rule bot draws from the game's seed and its seat, so every
trajectory of a group meets the same opponent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Protocol

from echo2.data.sandbox.sandbox import Bot, Turn
from echo2.data.task import Message
from echo2.errors import TaskFault

TextModel = Callable[[Sequence[Message]], Awaitable[str]]
"""A whole conversation → its next reply. Any model can be one: an endpoint, an engine with older weights, a test."""


class Player(Protocol):
    async def reply(self, turn: Turn, note: str) -> str:
        """What the player says. ``note`` says why its last reply was no action; empty when there is no reason."""
        ...


class BotPlayer:
    def __init__(self, bot: Bot, seed: str) -> None:
        self._bot, self._draw = bot, Random(seed)

    def answer(self, turn: Turn) -> str:
        return self._bot(turn.view, self._draw)

    async def reply(self, turn: Turn, note: str) -> str:
        return self.answer(turn)


class Speaker:
    """A player by text: the rules once, then what happened, turn by turn.

    say: what happened since its last turn → its reply; it remembers what was said before. ``Talk.say`` is one.
    """

    def __init__(self, say: Callable[[Sequence[Message]], Awaitable[str]], rules: str) -> None:
        self._say = say
        self._opening: list[Message] = [{"role": "system", "content": rules}]

    async def reply(self, turn: Turn, note: str) -> str:
        opening, self._opening = self._opening, []
        return await self._say([*opening, {"role": "user", "content": asked(turn, note)}])


class Memory:
    """Makes a ``say`` out of a model that wants the whole conversation each time."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._messages: list[Message] = []

    async def __call__(self, messages: Sequence[Message]) -> str:
        self._messages += messages
        reply: object = await self._model(self._messages)
        if not isinstance(reply, str):
            raise TaskFault(f"an opponent must answer with a text, got {type(reply).__name__}")
        self._messages.append({"role": "assistant", "content": reply})
        return reply


def asked(turn: Turn, note: str) -> str:
    """The text of a turn: s_t."""
    return f"{note}\n{turn.state}" if note else turn.state
