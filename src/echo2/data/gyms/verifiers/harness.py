"""The chat loop that plays an environment's tasks: its tools, and no others.

Invariant: it only ever appends: what a task says, the policy's replies as they came, what its tools returned. It runs
in the process of the library instead of starting a program per episode, which verifiers allows as long as every call of
the model goes through the endpoint it is given. A part of verifiers 0.4; only ``process.py`` imports it.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatLoop"]

NAME = "echo2_chat_loop"
"""Verifiers finds a harness by the name of a top-level module; ``process.py`` registers this one under it."""


class ChatLoop(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # verifiers is not installed where types are checked
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Turns until the policy calls no tool."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as opened:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, lines = await connect_mcp({"mcpServers": servers}, opened)
            session = await opened.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                async with session.post(f"{endpoint}/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=await answer.text())
                    message = (await answer.json())["choices"][0]["message"]
                messages.append(message)
                for call in message.get("tool_calls") or []:
                    content = await _called(call["function"], lines, dispatch)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _called(function: dict[str, Any], lines: Any, dispatch: dict[str, Any]) -> Any:
    """What a tool returned, or what was wrong with the call, for the policy to read."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments must be JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments must be a JSON object, got {type(arguments).__name__}"
    if function["name"] not in dispatch:
        return f"error: there is no tool {function['name']!r}"
    return await call_mcp(lines, dispatch, function["name"], arguments)
