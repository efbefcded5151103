from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.data.gyms.verifiers.exchange import Exchange, Rewritten
from echo2.data.gyms.verifiers.tools import read_calls

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_a_request_adds_what_is_new_since_the_last_reply() -> None:
    exchange = Exchange()
    opening = [system("Be brief."), user("Hi")]

    assert exchange.asked({"messages": opening}) == opening
    reply = exchange.said("Hello")
    assert exchange.asked({"messages": [*opening, reply, user("More")]}) == [user("More")]


def test_content_in_parts_and_other_names_of_a_role_are_the_same_message() -> None:
    exchange = Exchange()

    exchange.asked(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
            ]
        }
    )
    reply = exchange.said("Yes")
    assert exchange.asked({"messages": [system("Be brief."), reply, user("2?")]}) == [user("2?")]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("Hi"), {"role": "assistant", "content": "Hell"}, user("2")], r"message 2 \(assistant\) is another one"),
        ([user("Hi!"), {"role": "assistant", "content": "Hello"}, user("2")], r"message 1 \(user\) is another one"),
        ([user("Summary: hello was said"), user("2")], r"message 1 \(user\)"),
        ([user("Hi")], "must add to the conversation, it holds 1 messages of 2 said"),
        ([user("Hi"), {"role": "assistant", "content": "Hello"}], "must add to the conversation"),
        ([user("Hi"), {"role": "assistant", "content": "Hello"}, user("2"), {"role": "assistant", "content": "So"}],
         "put words in the policy's mouth"),
        ([], "must add to the conversation"),
        ([user("Hi"), {"role": "assistant", "content": "Hello"}, {"role": "user", "content": [{"type": "image_url"}]}],
         "text alone"),
    ],
)  # fmt: skip
def test_a_request_that_rewrites_history_is_refused(messages: list[dict[str, Any]], words: str) -> None:
    exchange = Exchange()
    exchange.asked({"messages": [user("Hi")]})
    exchange.said("Hello")

    with pytest.raises(Rewritten, match=words):
        exchange.asked({"messages": messages})


def test_two_requests_at_once_several_replies_and_changing_tools_are_refused() -> None:
    exchange = Exchange()
    with pytest.raises(Rewritten, match="one reply, it asked for 2"):
        exchange.asked({"messages": [user("Hi")], "n": 2})
    exchange.asked({"messages": [user("Hi")]})
    with pytest.raises(Rewritten, match="one thing at a time"):
        exchange.asked({"messages": [user("Hi")]})
    reply = exchange.said("Hello")
    with pytest.raises(Rewritten, match="tools must stay the same, they changed before turn 2"):
        exchange.asked({"messages": [user("Hi"), reply, user("2")], "tools": [TOOL]})


def test_tools_are_declared_called_and_answered_in_words() -> None:
    exchange = Exchange()
    opening = exchange.asked({"messages": [system("Count."), user("1+1?")], "tools": [TOOL]})

    assert opening[0]["role"] == "system"
    assert opening[0]["content"].startswith("Count.\n\n# Tools\n")
    assert json.dumps(TOOL) in opening[0]["content"]
    reply = exchange.said(f"Let me see. {CALL}{CALL}")
    assert reply["content"] == "Let me see."
    first, second = reply["tool_calls"]
    assert first["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert first["id"] != second["id"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in (first, second)]
    more = exchange.asked(
        {"messages": [system("Count."), user("1+1?"), reply, *results, user("Go on")], "tools": [TOOL]}
    )
    assert more == [
        user("<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n</tool_response>"),
        user("Go on"),
    ]


def test_without_a_system_message_the_tools_make_one_and_without_tools_a_call_is_text() -> None:
    exchange = Exchange()
    assert [part["role"] for part in exchange.asked({"messages": [user("1+1?")], "tools": [TOOL]})] == [
        "system",
        "user",
    ]

    plain = Exchange()
    plain.asked({"messages": [user("1+1?")]})
    assert plain.said(CALL) == {"role": "assistant", "content": CALL}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>add(1)</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
        "<tool_call>" * 50_000,
    ],
)
def test_a_call_that_cannot_be_read_stays_text(text: str) -> None:
    assert read_calls(text, 0) == (text, ())


@given(
    st.lists(st.sampled_from([CALL, "<tool_call>no</tool_call>", " and ", "<tool_call>", "</tool_call>"]), max_size=6)
)
def test_whatever_a_reply_holds_it_is_recognised_when_it_is_repeated(parts: list[str]) -> None:
    exchange = Exchange()
    exchange.asked({"messages": [user("1+1?")], "tools": [TOOL]})
    reply = json.loads(json.dumps(exchange.said("".join(parts))))

    exchange.asked({"messages": [user("1+1?"), reply, user("2")], "tools": [TOOL]})
