"""Tools in words: how they are declared to the policy, how it calls them, how it hears what came of it.

Invariant: pure. The policy sees text alone, in the form that Qwen and Hermes models are trained on, so any chat
template will do: declarations in the system message, calls in ``<tool_call>`` tags, results in ``<tool_response>`` tags
of a user's turn. A call that cannot be read is no call and stays in the reply's text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_DECLARED = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Call(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str
    """JSON, as the policy wrote it."""


def declared(tools: Sequence[dict[str, Any]]) -> str:
    """What a system message says of tools in the form of OpenAI's ``tools``."""
    return _DECLARED.format(signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def results(texts: Sequence[str]) -> str:
    """The user's turn that tells what calls returned, in their order."""
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)


def read_calls(reply: str, turn: int) -> tuple[str, tuple[Call, ...]]:
    """(the reply without its calls, the calls); linear in the length of the reply."""
    kept: list[str] = []
    calls: list[Call] = []
    at = 0
    while (start := reply.find(OPENING, at)) >= 0 and (end := reply.find(CLOSING, start)) >= 0:
        call = _call(reply[start + len(OPENING) : end], f"call_{turn}_{len(calls)}")
        stop = end + len(CLOSING)
        kept.append(reply[at : start if call is not None else stop])
        calls += [call] if call is not None else []
        at = stop
    kept.append(reply[at:])
    text = "".join(kept)
    return (text.strip() if calls else text), tuple(calls)


def _call(text: str, call_id: str) -> Call | None:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        return None
    arguments = told.get("arguments", {})
    if isinstance(arguments, dict):
        return Call(call_id, told["name"], json.dumps(arguments, ensure_ascii=False))
    return Call(call_id, told["name"], arguments) if isinstance(arguments, str) else None
