"""Chat completions: the one request that every server knows, text in and text out.

Invariant: a reply has one choice, text, and an end that means stop or length; anything else is a ``WrongAnswer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from echo2.data.task import Message
from echo2.transport.json_line import JsonLine, WrongAnswer, decoded
from echo2.types import Sampling

ENDS = frozenset({"stop", "length"})


class Said(msgspec.Struct, frozen=True):
    text: str
    finish: str
    """``stop`` or ``length``."""
    model: str | None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    model: str | None = None


async def ask_chat(
    line: JsonLine,
    path: str,
    model: str,
    messages: Sequence[Message],
    sampling: Sampling,
    seed: int,
    *,
    thinking: bool | None,
    deadline_s: float,
    again: bool = False,
) -> Said:
    """thinking: for templates that know ``enable_thinking``; None sends nothing. Raises NoAnswer, WrongAnswer."""
    sent: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
        "stream": False,
    }
    if thinking is not None:
        sent["chat_template_kwargs"] = {"enable_thinking": thinking}
    body = await line.ask("POST", path, sent, deadline_s=deadline_s, again=again)
    answer = decoded("server", body, _Answer, "a chat completion")
    if len(answer.choices) != 1:
        raise WrongAnswer(f"server: one reply was asked for, {len(answer.choices)} came")
    (choice,) = answer.choices
    if choice.finish_reason not in ENDS:
        raise WrongAnswer(f"server: a reply must end with stop or length, it ended with {choice.finish_reason!r}")
    return Said(choice.message.content or "", choice.finish_reason or "", answer.model)
