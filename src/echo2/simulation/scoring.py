"""Scoring again in virtual time: at once, by the world's own tasks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from echo2.coordinator.rescoring import NoScore
from echo2.data.chat import ByteChat
from echo2.data.task import Score, Task
from echo2.types import TOKEN_DTYPE, Prompt


class ScoredAtOnce:
    """``rescoring.Scorer``."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self._chat = ByteChat()

    async def score(self, prompt: Prompt, reply: bytes) -> Score:
        text = self._chat.decode(np.frombuffer(reply, TOKEN_DTYPE).tolist())
        try:
            return await self._tasks[prompt.task].judge(prompt, text)
        except Exception as error:
            raise NoScore(f"{type(error).__name__}: {error}") from error
