"""JSON requests to a server that is not ours: an inference server, or somebody's OpenAI-style endpoint.

Invariant (I7): every request has one deadline, retries and reading included, and an answer a largest size; what comes
late, broken or too long is an ``EngineError`` that names the server. A key is sent and never shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from echo2.errors import EngineError

T = TypeVar("T")

MAX_ANSWER_BYTES = 64 << 20
"""A reply of 100,000 tokens with log-probs is 10 MB."""
FIRST_PAUSE_S = 0.5
"""Before the first retry; doubled each time."""
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
SHOWN = 300
"""Bytes of a wrong answer that an error quotes."""


class NoAnswer(EngineError):
    """Nothing came: no connection, or the deadline passed."""


class WrongAnswer(EngineError):
    """An answer came, and not the one that was asked for."""

    def __init__(self, sentence: str, status: int = 200) -> None:
        super().__init__(sentence)
        self.status = status


class JsonLine:
    """Use as a context, or close it in the loop that used it.

    url: what every path is appended to.  who: how errors call the other side.  key: sent as a bearer token.
    """

    def __init__(self, url: str, *, who: str, key: str = "", most_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._url = url.rstrip("/")
        self._who = who
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._most_bytes = most_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(
        self,
        verb: str,
        path: str,
        sent: object = None,
        *,
        deadline_s: float,
        query: Mapping[str, str] | None = None,
        again: bool = False,
    ) -> bytes:
        """The body of a 200. again: busy and failing servers are asked again, until the deadline.

        Raises NoAnswer, WrongAnswer.
        """
        place = f"{self._who} at {self._url}{path}"
        try:
            async with asyncio.timeout(deadline_s):
                return await self._ask(place, verb, path, sent, query, again)
        except TimeoutError as error:
            raise NoAnswer(f"{place}: no reply within {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"{place}: {error or type(error).__name__}") from error

    async def _ask(
        self, place: str, verb: str, path: str, sent: object, query: Mapping[str, str] | None, again: bool
    ) -> bytes:
        if self._session is None:
            # The group's rows are asked for at the same time; how many may run is the server's decision.
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector, timeout=timeout)
        more: dict[str, Any] = {} if sent is None else {"json": sent}
        pause_s = FIRST_PAUSE_S
        while True:
            async with self._session.request(verb, self._url + path, params=query, **more) as answer:
                body = await self._body(place, answer)
                if answer.status == 200:
                    return body
                if not again or answer.status not in RETRIED:
                    raise WrongAnswer(f"{place}: answered {answer.status}: {shown(body)}", answer.status)
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _body(self, place: str, answer: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in answer.content.iter_chunked(1 << 16):
            body += part
            if len(body) > self._most_bytes:
                raise WrongAnswer(f"{place}: an answer must be at most {self._most_bytes} bytes")
        return bytes(body)


def shown(body: bytes) -> str:
    return repr(body[:SHOWN])


def decoded(who: str, body: bytes, kind: type[T], what: str) -> T:
    """Raises WrongAnswer for a body that is no ``kind``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WrongAnswer(f"{who}: the answer must be {what} ({error}), got {shown(body)}") from error
