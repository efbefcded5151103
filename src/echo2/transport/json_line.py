"""JSON requests to a server that is not ours: an inference server, or somebody's OpenAI-style endpoint.

Invariant (I7): every request has one deadline, retries and reading included, and an answer a largest size; what comes
late, broken or too long is an ``EngineError`` that names the server. A key is sent and never shown. Only the server at
the address answers: redirects are not followed, since whoever is at their end was given no weights.
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
BUSY, UNAVAILABLE = 429, 503
"""Nothing was done: asked again by every caller, the second where the server says when."""
SHOWN = 300
"""Bytes of a wrong answer, and characters of a library's words, that an error quotes."""


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
        """The body of a 200. Servers that are busy or say when to come again are asked again.

        again: failing ones, too. Raises NoAnswer, WrongAnswer; the last answer, where the deadline leaves no other try.
        """
        place = f"{self._who} at {self._url}{path}"
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await self._ask(place, verb, path, sent, query, again, limit.when())
        except TimeoutError as error:
            raise NoAnswer(f"{place}: no reply within {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            words = " ".join(str(error).split())[:SHOWN]
            raise NoAnswer(f"{place}: {words or type(error).__name__}") from error

    async def _ask(
        self,
        place: str,
        verb: str,
        path: str,
        sent: object,
        query: Mapping[str, str] | None,
        again: bool,
        until_s: float | None,
    ) -> bytes:
        """until_s: the deadline, by the loop's clock."""
        if self._session is None:
            # The group's rows are asked for at the same time; how many may run is the server's decision.
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector, timeout=timeout)
        more: dict[str, Any] = {"allow_redirects": False} if sent is None else {"allow_redirects": False, "json": sent}
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            async with self._session.request(verb, self._url + path, params=query, **more) as answer:
                body = await self._body(place, answer)
                if answer.status == 200:
                    return body
                asked_s = _retry_after_s(answer.headers)
                later = answer.status == BUSY or (answer.status == UNAVAILABLE and asked_s is not None)
                wait_s = max(pause_s, asked_s or 0.0)
                late = until_s is not None and loop.time() + wait_s >= until_s
                if late or not (later or (again and answer.status in RETRIED)):
                    raise WrongAnswer(f"{place}: {_said(answer, body)}", answer.status)
            await asyncio.sleep(wait_s)
            pause_s *= 2

    async def _body(self, place: str, answer: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in answer.content.iter_chunked(1 << 16):
            body += part
            if len(body) > self._most_bytes:
                raise WrongAnswer(f"{place}: an answer must be at most {self._most_bytes} bytes")
        return bytes(body)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """What the server asks to wait; None where it does not say so in seconds."""
    words = headers.get("Retry-After", "").strip()
    return float(words) if words.isascii() and words.isdecimal() and len(words) <= 9 else None


def _said(answer: aiohttp.ClientResponse, body: bytes) -> str:
    """An answer other than 200, for people."""
    where = answer.headers.get("Location")
    if 300 <= answer.status < 400 and where is not None:
        return f"it must answer itself, it redirects to {where[:SHOWN]!r} ({answer.status}); correct its address"
    asked_s = _retry_after_s(answer.headers)
    return (
        f"answered {answer.status}{'' if asked_s is None else f', to be asked again in {asked_s:g} s'}: {shown(body)}"
    )


def shown(body: bytes) -> str:
    return repr(body[:SHOWN])


def decoded(who: str, body: bytes, kind: type[T], what: str) -> T:
    """Raises WrongAnswer for a body that is no ``kind``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WrongAnswer(f"{who}: the answer must be {what} ({error}), got {shown(body)}") from error
