"""The policy as an OpenAI-style chat endpoint on the loopback interface, for one episode.

Invariant: each request is one turn of the policy, in order; one that does not extend the conversation is refused with
status 400, which no client tries again, and its reason is kept in ``fault``. What a request says of sampling is passed
over: the policy samples as the run says.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from echo2.data.gyms.gym import GymError
from echo2.data.gyms.verifiers.exchange import Exchange
from echo2.data.task import Message

MODEL = "policy"
MAX_REQUEST_BYTES = 64 * 2**20
Sayer = Callable[[list[Message]], Awaitable[str]]


class Endpoint:
    """``url`` ends in ``/v1`` and holds a secret: others on this machine cannot speak in the episode's name."""

    def __init__(self, say: Sayer) -> None:
        self.url = ""
        self.fault: GymError | None = None
        """Why a request was refused; the first."""
        self._say = say
        self._exchange = Exchange()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            new = self._exchange.asked(body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return self._refused(GymError(f"a request must be a chat completion's, it cannot be read: {error!r}"))
        except GymError as error:
            return self._refused(error)
        message = self._exchange.said(await self._say(new))
        finish = "tool_calls" if "tool_calls" in message else "stop"
        if not body.get("stream"):
            return web.json_response(_completion("chat.completion", {"message": message, "finish_reason": finish}))
        calls = [{"index": place, **call} for place, call in enumerate(message.pop("tool_calls", []))]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunks: list[dict[str, Any]] = [{"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": finish}]
        events = [json.dumps(_completion("chat.completion.chunk", chunk)) for chunk in chunks]
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        return web.Response(text=text, content_type="text/event-stream")

    def _refused(self, error: GymError) -> web.Response:
        self.fault = self.fault or error
        return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)


@asynccontextmanager
async def serve(say: Sayer) -> AsyncIterator[Endpoint]:
    """An endpoint that asks ``say``; it is gone when the block ends."""
    endpoint = Endpoint(say)
    secret = secrets.token_urlsafe(16)
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.router.add_post(f"/{secret}/v1/chat/completions", endpoint.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}/v1"
        yield endpoint
    finally:
        await runner.cleanup()


def _completion(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, **choice}],
    }
