"""An opponent behind an OpenAI-style chat endpoint: a public service, vLLM, SGLang, Parallax, llama.cpp.

Invariant (I7): every request has one deadline, retries included; what comes late or wrong raises, so the game is a
failed row and never one that somebody won. The key is read from the environment and is part of no prompt, log or
fingerprint.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from echo2.data.task import Message
from echo2.errors import ConfigError, EngineError

MAX_ANSWER_BYTES = 1 << 20
FIRST_PAUSE_S = 0.5
"""Before the first retry; doubled each time."""
RETRIED = frozenset({408, 429, 500, 502, 503, 504})


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
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._deadline_s = deadline_s
        self._fields: dict[str, Any] = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._headers = {"Authorization": f"Bearer {os.environ[key_variable]}"} if key_variable else {}

    async def __call__(self, messages: Sequence[Message]) -> str:
        """The next reply. Raises EngineError when there is none by the deadline, or none that can be read."""
        try:
            async with asyncio.timeout(self._deadline_s), aiohttp.ClientSession(headers=self._headers) as session:
                return await self._ask(session, messages)
        except TimeoutError as error:
            raise EngineError(f"opponent at {self._url}: no reply within {self._deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"opponent at {self._url}: {error or type(error).__name__}") from error

    async def _ask(self, session: aiohttp.ClientSession, messages: Sequence[Message]) -> str:
        pause_s = FIRST_PAUSE_S
        while True:
            async with session.post(self._url, json={**self._fields, "messages": list(messages)}) as answer:
                body = await self._body(answer)
                if answer.status == 200:
                    return _text(self._url, body)
                if answer.status not in RETRIED:
                    raise EngineError(f"opponent at {self._url}: answered {answer.status}: {body[:200]!r}")
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _body(self, answer: aiohttp.ClientResponse) -> bytes:
        body = b""
        async for part in answer.content.iter_chunked(1 << 16):
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise EngineError(f"opponent at {self._url}: an answer must be at most {MAX_ANSWER_BYTES} bytes")
        return body


def _text(url: str, body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body, type=_Answer)
        return answer.choices[0].message.content or ""
    except (msgspec.DecodeError, IndexError) as error:
        raise EngineError(f"opponent at {url}: the answer must be a chat completion, got {body[:200]!r}") from error
