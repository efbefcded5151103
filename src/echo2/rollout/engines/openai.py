"""Any OpenAI-style chat endpoint as an engine that can be asked and not trained: for evaluations.

Invariant: it bears the policy it was told to be, whose weights nobody here gave it, so it has no place in a run:
``echo2 train`` refuses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from echo2.config.sections import ServerSection
from echo2.data.task import Message
from echo2.errors import EngineError, first_cause
from echo2.rollout.engine import ActivationMode, Capabilities, Completion, Heard, Spoken
from echo2.rollout.engines.servers.chat import ask_chat
from echo2.rollout.engines.servers.rows import row_seed
from echo2.transport.json_line import JsonLine
from echo2.types import FinishReason, Policy, Sampling

WHO = "endpoint"


class OpenAIEngine:
    """server: its url up to and including ``/v1``, and model."""

    def __init__(self, server: ServerSection, key: str) -> None:
        self._line = JsonLine(server.url, who=WHO, key=key)
        self._model = server.model
        self._deadline_s = server.request_timeout_s
        self.installed: Policy | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            logprobs=False,
            token_in=False,
            modes=frozenset({ActivationMode.DRAIN, ActivationMode.ABORT}),
            seeded=False,
        )

    @property
    def fault(self) -> str | None:
        return None

    async def mend(self) -> None:
        """There is never a fault."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        raise EngineError("an OpenAI-style endpoint must be asked with messages, it takes no tokens")

    async def speak(self, messages: Sequence[Message], sampling: Sampling, n: int, *, thinking: bool) -> list[Spoken]:
        policy = self.installed
        if policy is None:
            raise EngineError("a policy must be installed before anything is generated; activate one first")
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(
                        ask_chat(
                            self._line,
                            "/chat/completions",
                            self._model,
                            messages,
                            sampling,
                            row_seed(sampling.seed, position, 0),
                            thinking=None,
                            deadline_s=self._deadline_s,
                            again=True,
                        )
                    )
                    for position in range(n)
                ]
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors
        said = [task.result() for task in asked]
        return [
            Spoken(one.text, policy, policy, FinishReason.LENGTH if one.finish == "length" else FinishReason.STOP)
            for one in said
        ]

    async def prefetch(self, policy: Policy, folder: Path) -> None:
        """There is nothing to load: whatever the endpoint has is called by this name."""

    async def activate(self, policy: Policy, mode: ActivationMode = ActivationMode.DRAIN) -> None:
        self.installed = policy

    async def close(self) -> None:
        self.installed = None
        await self._line.close()
