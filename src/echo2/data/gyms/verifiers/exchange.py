"""An episode's conversation as its chat requests tell it, turned into what is new since the policy's last turn.

Invariant (B03): every request must repeat, message for message, all that was said before it, the policy's replies as
they were given, and then add to it; only then do its tokens extend the last turn's. A request that does not is refused
and ends the episode with the reason: a history that was shortened, summarised, edited or branched is never trained on
under the wrong mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from echo2.data.gyms.gym import GymError
from echo2.data.gyms.verifiers import tools
from echo2.data.gyms.verifiers.tools import Call
from echo2.data.task import Message

_ROLES = {"developer": "system"}
"""Other names of a role."""


class Rewritten(GymError):
    """A request that does not extend the conversation."""


class Said(msgspec.Struct, frozen=True):
    """One message, whatever form a request gave it."""

    role: str
    text: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    """Of a tool's result: the call it answers."""


class Exchange:
    """A state machine: ``asked`` and ``said`` in turn."""

    def __init__(self) -> None:
        self._known: list[Said] = []
        self._tools: list[dict[str, Any]] = []
        self._turn = 0
        self._waiting = False

    def asked(self, body: Mapping[str, Any]) -> list[Message]:
        """What a request in the form of chat completions adds to the conversation. Raises Rewritten."""
        if self._waiting:
            raise Rewritten("an episode must ask the policy one thing at a time, it asked while a reply was awaited")
        if body.get("n") not in (None, 1):
            raise Rewritten(f"a request must ask for one reply, it asked for {body['n']}")
        told = [_read(message) for message in body.get("messages") or []]
        new = self._added(told)
        offered = list(body.get("tools") or [])
        if self._turn and offered != self._tools:
            raise Rewritten(f"an episode's tools must stay the same, they changed before turn {self._turn + 1}")
        self._tools = offered
        opening = self._turn == 0
        self._known, self._waiting = told, True
        return _opening(new, offered) if opening else _turns(new)

    def said(self, reply: str) -> dict[str, Any]:
        """The policy's reply as the message of a chat completion, which later requests must repeat."""
        text, calls = tools.read_calls(reply, self._turn) if self._tools else (reply, ())
        self._known.append(Said("assistant", text, calls))
        self._turn += 1
        self._waiting = False
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message

    def _added(self, told: Sequence[Said]) -> Sequence[Said]:
        for place, (known, now) in enumerate(zip(self._known, told, strict=False), 1):
            if known != now:
                raise Rewritten(
                    f"a request must repeat the conversation so far, message {place} ({known.role}) is another one: the"
                    f" environment or its harness rewrites history"
                )
        new = told[len(self._known) :]
        if not new:
            raise Rewritten(
                f"a request must add to the conversation, it holds {len(told)} messages of {len(self._known)} said"
            )
        if self._turn and any(message.role == "assistant" for message in new):
            raise Rewritten("a request must not put words in the policy's mouth, it adds a turn of the assistant")
        return new


def _read(message: Mapping[str, Any]) -> Said:
    role = str(message.get("role"))
    calls = tuple(
        Call(str(call.get("id")), str(call["function"]["name"]), str(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
        if call.get("function")
    )
    return Said(_ROLES.get(role, role), _text(message.get("content")), calls, str(message.get("tool_call_id") or ""))


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise Rewritten("a message must be of text alone, it holds another kind of content")
    return "".join(part["text"] for part in content)


def _opening(told: Sequence[Said], offered: Sequence[dict[str, Any]]) -> list[Message]:
    if not offered:
        return _turns(told)
    if told[0].role == "system":
        first, rest = f"{told[0].text}\n\n{tools.declared(offered)}", told[1:]
    else:
        first, rest = tools.declared(offered), told
    return [{"role": "system", "content": first}, *_turns(rest)]


def _turns(told: Sequence[Said]) -> list[Message]:
    """Messages as a chat template takes them; results that follow each other are one turn of the user."""
    turns: list[Message] = []
    heard: list[str] = []
    for message in [*told, None]:
        if message is not None and message.role == "tool":
            heard.append(message.text)
            continue
        if heard:
            turns.append({"role": "user", "content": tools.results(heard)})
            heard = []
        if message is not None:
            turns.append({"role": message.role, "content": message.text})
    return turns
