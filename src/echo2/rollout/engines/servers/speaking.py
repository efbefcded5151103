"""A server that takes conversations and gives text, as an engine.

Invariant (I5): as for ``ServerEngine``. A reply that was cut off by a switch is not gone on with, because nobody knows
its tokens: modes are drain and abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from echo2.data.task import Message
from echo2.errors import EngineError, first_cause
from echo2.rollout.engine import Capabilities, Completion, Heard, Spoken
from echo2.rollout.engines.servers.engine import ServerEngine
from echo2.rollout.engines.servers.rows import Question, row_seed
from echo2.types import FinishReason, Sampling


class Utterance:
    """One reply that is asked for."""

    is_cut_by_context = False

    def __init__(self, messages: Sequence[Message], sampling: Sampling, position: int, thinking: bool) -> None:
        self._messages = tuple(messages)
        seed = row_seed(sampling.seed, position, 0)
        self._sampling = msgspec.structs.replace(sampling, seed=seed)
        self._thinking = thinking

    def question(self, model: str, label: str) -> Question:
        return Question((), self._sampling, model, label, self._messages, self._thinking)


class SpeakingServerEngine(ServerEngine):
    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, token_in=False)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        if self.installed is None:
            raise EngineError("a policy must be installed before anything is generated; activate one first")
        raise EngineError("this server must be asked with messages, it takes no tokens")

    async def speak(self, messages: Sequence[Message], sampling: Sampling, n: int, *, thinking: bool) -> list[Spoken]:
        if self.installed is None:
            raise EngineError("a policy must be installed before anything is generated; activate one first")
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(self._say(Utterance(messages, sampling, position, thinking)))
                    for position in range(n)
                ]
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors
        return [task.result() for task in asked]

    async def _say(self, utterance: Utterance) -> Spoken:
        async with self._gate.entered(begun=False) as leave:
            policy = self.installed
            if policy is None:
                raise EngineError("the engine was closed")
            answer = await leave.within(self._serving.ask(utterance))
            assert answer.text is not None, "that was checked"
            finish = FinishReason.LENGTH if answer.finish == "length" else FinishReason.STOP
            return Spoken(answer.text, policy, policy, finish)
