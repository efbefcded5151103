from __future__ import annotations

import json

import aiohttp
import pytest

from echo2.data.gyms.verifiers.endpoint import serve
from echo2.data.task import Message


async def echo(messages: list[Message]) -> str:
    return f"heard {messages[-1]['content']}"


async def test_turns_of_the_policy_are_chat_completions() -> None:
    async with serve(echo) as endpoint, aiohttp.ClientSession() as session:
        messages = [{"role": "user", "content": "Hi"}]
        for turn in ("Hi", "2"):
            async with session.post(f"{endpoint.url}/chat/completions", json={"messages": messages}) as answer:
                choice = (await answer.json())["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (f"heard {turn}", "stop")
            messages += [choice["message"], {"role": "user", "content": "2"}]
        assert endpoint.fault is None


async def test_a_streamed_turn_is_the_same_one() -> None:
    async with serve(echo) as endpoint, aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with session.post(f"{endpoint.url}/chat/completions", json=body) as answer:
            lines = [line for line in (await answer.text()).splitlines() if line]
    assert answer.content_type == "text/event-stream"
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == "heard Hi"
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "must add to the conversation"),
        ([1], "must be a chat completion's"),
        ({"messages": [3]}, "cannot be read"),
    ],
)
async def test_what_is_no_next_turn_is_refused_and_the_reason_kept(body: object, words: str) -> None:
    async with serve(echo) as endpoint, aiohttp.ClientSession() as session:
        async with session.post(f"{endpoint.url}/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert words in (await answer.json())["error"]["message"]
        assert words in str(endpoint.fault)


async def test_nobody_speaks_without_the_secret() -> None:
    async with serve(echo) as endpoint, aiohttp.ClientSession() as session:
        stranger = endpoint.url.rsplit("/", 2)[0]
        async with session.post(f"{stranger}/v1/chat/completions", json={}) as answer:
            assert answer.status == 404
