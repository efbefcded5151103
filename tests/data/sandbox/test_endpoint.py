from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from building import prompt

from echo2.data.sandbox.endpoint import Endpoint
from echo2.data.task import Message, Score, Split, Task
from echo2.errors import ConfigError, EngineError
from echo2.transport import json_line
from echo2.types import Prompt

ASKED: list[Message] = [{"role": "system", "content": "rules"}, {"role": "user", "content": "Hand: [Ah, Kd]"}]


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def completion(text: str) -> web.Response:
    return web.json_response({"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})


async def test_a_reply_is_asked_for_with_the_whole_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(await request.json(), key=request.headers.get("Authorization"))
        return completion("Action: call")

    monkeypatch.setenv("OPPONENT_KEY", "secret")
    async with serving(handler) as url:
        model = Endpoint(url=url, model="m", temperature=0.2, max_tokens=9, key_variable="OPPONENT_KEY")
        assert await model(ASKED) == "Action: call"
    assert seen == {"model": "m", "temperature": 0.2, "max_tokens": 9, "messages": ASKED, "key": "Bearer secret"}


async def test_a_busy_endpoint_is_asked_again_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_line, "FIRST_PAUSE_S", 0.0)
    answers = [
        web.Response(status=503),
        web.Response(status=429),
        completion("ok"),
        web.Response(status=401, text="no"),
    ]

    async def handler(request: web.Request) -> web.Response:
        return answers.pop(0)

    async with serving(handler) as url:
        model = Endpoint(url=url, model="m")
        assert await model(ASKED) == "ok"
        with pytest.raises(EngineError, match="answered 401"):
            await model(ASKED)
    assert not answers


async def test_i7_what_comes_late_or_wrong_raises() -> None:
    released = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await released.wait()
        return completion("too late")

    async def odd(request: web.Request) -> web.Response:
        return web.json_response({"choices": []})

    async with serving(odd) as url:
        with pytest.raises(EngineError, match="must be a chat completion"):
            await Endpoint(url=url, model="m")(ASKED)
    with pytest.raises(EngineError, match="opponent at"):
        await Endpoint(url=url, model="m", deadline_s=5.0)(ASKED)
    async with serving(silent) as url:
        with pytest.raises(EngineError, match=r"no reply within 0\.05 s"):
            await Endpoint(url=url, model="m", deadline_s=0.05)(ASKED)
        released.set()


def test_wrong_options_are_told_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"url must begin with http.*ABSENT_KEY must hold the API key"):
        Endpoint(url="localhost:1", model="m", key_variable="ABSENT_KEY")


async def test_an_endpoint_can_be_a_tasks_judge() -> None:
    """What it says that is no grade fails the row, and is no zero (I4)."""

    async def handler(request: web.Request) -> web.Response:
        (message,) = (await request.json())["messages"]
        return completion("0.75" if message["content"].endswith("Paris.") else "no number")

    class Capitals(Task):
        name = "capitals"

        def __init__(self, url: str) -> None:
            self._judge = Endpoint(url=url, model="m")

        def size(self, split: Split) -> int | None:
            return 1

        def prompt(self, split: Split, index: int) -> Prompt:
            return prompt(index, self.name)

        def messages(self, prompt: Prompt) -> list[Message]:
            return [{"role": "user", "content": "The capital of France?"}]

        def score(self, prompt: Prompt, reply: str) -> Score:
            raise NotImplementedError("it is judged")

        async def judge(self, prompt: Prompt, reply: str) -> Score:
            said = await self._judge([{"role": "user", "content": f"Grade from 0 to 1: {reply}"}])
            return Score(float(said), "judged")

    async with serving(handler) as url:
        task = Capitals(url)
        assert await task.judge(task.prompt("train", 0), "It is Paris.") == Score(0.75, "judged")
        with pytest.raises(ValueError, match="no number"):
            await task.judge(task.prompt("train", 0), "It is Rome.")
