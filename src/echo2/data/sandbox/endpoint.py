"""An opponent behind an OpenAI-style chat endpoint: a public service, vLLM, SGLang, Parallax, llama.cpp.

Invariant (I7): every request has one deadline, retries included; what comes late or wrong raises, so the game is a
failed row and never one that somebody won. The key is read from the environment and is part of no prompt, log or
fingerprint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from echo2.data.task import Message
from echo2.errors import ConfigError
from echo2.transport.json_line import JsonLine, WrongAnswer, decoded

MAX_ANSWER_BYTES = 1 << 20
PATH = "/chat/completions"


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Said


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Endpoint:
    """url: up to and including ``/v1``.  model: its name there.  deadline_s: of a reply, retries included.

    key_variable: environment variable that holds the API key; empty for none.  temperature, max_tokens: of its replies.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        deadline_s: float = 60.0,
        temperature: float = 0.7,
        max_tokens: int = 512,
        key_variable: str = "",
    ) -> None:
        faults = []
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            faults.append(f"endpoint: url must begin with http:// or https://, got {url!r}")
        if not isinstance(deadline_s, int | float) or not 0 < deadline_s <= 3600:
            faults.append(f"endpoint: deadline_s must be in (0, 3600], got {deadline_s!r}")
        if key_variable and key_variable not in os.environ:
            faults.append(f"endpoint: the environment variable {key_variable} must hold the API key, it is not set")
        if faults:
            raise ConfigError(faults)
        self._url = url
        self._deadline_s = deadline_s
        self._fields: dict[str, Any] = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._key = os.environ[key_variable] if key_variable else ""

    async def __call__(self, messages: Sequence[Message]) -> str:
        """The next reply. Raises EngineError when there is none by the deadline, or none that can be read."""
        sent = {**self._fields, "messages": list(messages)}
        async with JsonLine(self._url, who="opponent", key=self._key, most_bytes=MAX_ANSWER_BYTES) as line:
            body = await line.ask("POST", PATH, sent, deadline_s=self._deadline_s, again=True)
        answer = decoded("opponent", body, _Answer, "a chat completion")
        if not answer.choices:
            raise WrongAnswer("opponent: the answer must be a chat completion, it has no choices")
        return answer.choices[0].message.content or ""
