from __future__ import annotations

from games import CHAT, sandbox_task

from echo2.learner.gold import gold_turns

MANY = 10**6


def test_a_gold_talk_becomes_the_tokens_that_an_episode_feeds_and_samples() -> None:
    task = sandbox_task(sandbox="moba")
    talk = task.gold_talk(task.prompt("train", 0))
    assert talk is not None
    turns = gold_turns(talk, CHAT, False, MANY)
    assert len(turns) == sum(message["role"] == "assistant" for message in talk)
    tokens = [token for fed, reply in turns for token in (*fed, *reply)]
    assert tokens == CHAT.render(talk, thinking=False)[: len(tokens)]
    assert [CHAT.decode(reply) for _, reply in turns] == [m["content"] for m in talk if m["role"] == "assistant"]


def test_turns_beyond_the_token_limit_are_left_out_but_never_the_first() -> None:
    task = sandbox_task(sandbox="moba")
    talk = task.gold_talk(task.prompt("train", 0))
    assert talk is not None
    turns = gold_turns(talk, CHAT, False, MANY)
    two = sum(len(fed) + len(reply) for fed, reply in turns[:2])
    assert gold_turns(talk, CHAT, False, two) == turns[:2]
    assert gold_turns(talk, CHAT, False, two - 1) == gold_turns(talk, CHAT, False, 1) == turns[:1]
