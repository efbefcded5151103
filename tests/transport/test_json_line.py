"""What an endpoint may answer, over real sockets: told in a sentence that names it, in time, and never believed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from echo2.errors import EngineError
from echo2.transport import json_line
from echo2.transport.json_line import JsonLine, NoAnswer, WrongAnswer

EMPTY = b"Content-Length: 2\r\n\r\n{}"


class Raw:
    """Answers each request with the next of some bytes, the last of them again and again; None: with nothing."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self.asked: list[bytes] = []
        self.ended = asyncio.Event()
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            if answer is None:
                await self.ended.wait()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def listening(*answers: bytes | None) -> AsyncIterator[Raw]:
    raw = Raw(*answers)
    server = await asyncio.start_server(raw, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        raw.ended.set()
        server.close()
        await server.wait_closed()


async def ask(raw: Raw, *, deadline_s: float = 20.0, again: bool = False, most_bytes: int = 1 << 20) -> bytes:
    async with JsonLine(raw.url, who="server", key="secret", most_bytes=most_bytes) as line:
        return await line.ask("POST", "/generate", {"a": 1}, deadline_s=deadline_s, again=again)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_line, "FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_told_and_nobody_else_is_asked(status: int) -> None:
    """Whoever is there has other weights, and would be sent the prompt."""
    async with listening(b"HTTP/1.1 200 OK\r\n" + EMPTY) as other:
        head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {other.url}/generate\r\n".encode()
        async with listening(head + EMPTY) as raw:
            with pytest.raises(WrongAnswer, match=rf"must answer itself, it redirects to '{other.url}.* \({status}\)"):
                await ask(raw, again=True)
        assert (len(raw.asked), len(other.asked)) == (1, 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * (10 << 20) + b"\r\n" + EMPTY,
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * (1 << 20) + EMPTY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 10485760\r\n\r\n" + b" " * (10 << 20),
        bytes(range(256)) * 100,
    ],
    ids=["nothing", "short", "negative", "huge", "chunks", "gzip", "long head", "many heads", "long body", "noise"],
)
async def test_what_is_no_answer_is_told_in_one_line_that_names_the_server(answer: bytes) -> None:
    async with listening(answer) as raw:
        with pytest.raises(EngineError) as told:
            await ask(raw)
    sentence = str(told.value)
    assert sentence.startswith(f"server at {raw.url}/generate: ")
    assert "\n" not in sentence and len(sentence) < 500 and "secret" not in sentence


async def test_silence_and_a_body_that_never_ends_have_one_deadline() -> None:
    for answer in (None, b"HTTP/1.1 100 Continue\r\n\r\n" * 9):
        async with listening(answer, None) as raw:
            with pytest.raises(NoAnswer, match=r"no reply within 0\.2 s|disconnected"):
                await ask(raw, deadline_s=0.2)


@pytest.mark.parametrize(
    ("head", "again"),
    [
        (b"HTTP/1.1 429 Busy\r\n", False),
        (b"HTTP/1.1 429 Busy\r\nRetry-After: 0\r\n", False),
        (b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\n", False),
        (b"HTTP/1.1 503 Busy\r\n", True),
        (b"HTTP/1.1 429 Busy\r\nRetry-After: Wed, 21 Oct 2015 07:28:00 GMT\r\n", False),
        (b"HTTP/1.1 429 Busy\r\nRetry-After: " + b"9" * 5000 + b"\r\n", False),
    ],
)
async def test_who_is_busy_is_asked_again(head: bytes, again: bool) -> None:
    async with listening(head + EMPTY, head + EMPTY, b"HTTP/1.1 200 OK\r\n" + EMPTY) as raw:
        assert await ask(raw, again=again) == b"{}"
        assert len(raw.asked) == 3


async def test_who_is_failing_is_asked_again_only_where_that_was_wished() -> None:
    async with listening(b"HTTP/1.1 503 Down\r\n" + EMPTY) as raw:
        with pytest.raises(WrongAnswer, match=r"answered 503: b'\{\}'"):
            await ask(raw)
        assert len(raw.asked) == 1


async def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    async with listening(b"HTTP/1.1 429 Busy\r\nRetry-After: 3600\r\n" + EMPTY) as raw:
        with pytest.raises(WrongAnswer, match="answered 429, to be asked again in 3600 s") as told:
            await ask(raw, again=True)
    assert told.value.status == 429
