from __future__ import annotations

import msgspec

from echo2.config.sections import TaskSection
from echo2.data.chat import ByteChat
from echo2.data.inspect import check, episode_rows, show
from echo2.data.registry import load_task
from echo2.data.task import Message, Score, Split
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.types import Prompt


def test_only_the_replys_tokens_bear_loss() -> None:
    task = load_task(TaskSection(name="arithmetic"))
    shown = show(task, ByteChat(), 0)
    assert ByteChat().decode([row.token_id for row in shown.tokens if row.sampled]) == shown.reply
    assert shown.tokens[-1].text == "<end>"
    assert not any(row.sampled for row in shown.tokens[: -len(shown.reply) - 1])


class Unfair(Arithmetic):
    def score(self, prompt: Prompt, reply: str) -> Score:
        if reply.endswith("1"):
            raise ValueError("ones are hard")
        return Score(0.5, "wrong") if reply.endswith("2") else super().score(prompt, reply)


def test_a_check_names_every_gold_reply_that_fails() -> None:
    result = check(Unfair(max_operand=3), 100)
    assert not result.passed
    sentences = [sentence for _, sentence in result.failures]
    assert any(sentence.endswith("must get reward 1, got 0.5 (wrong)") for sentence in sentences)
    assert any("cannot be scored: ValueError: ones are hard (" in sentence for sentence in sentences)


class Forgetful(Arithmetic):
    """Makes another prompt, one that cannot be sent, and one that it does not know again when it arrives."""

    def prompt(self, split: Split, index: int) -> Prompt:
        made = super().prompt(split, index)
        self.asked = getattr(self, "asked", 0) + 1
        extra = (self.asked, object, (1, 2))[index]
        return msgspec.structs.replace(made, content={**made.content, "extra": extra})

    def score(self, prompt: Prompt, reply: str) -> Score:
        if not isinstance(prompt.content["extra"], tuple):
            raise TypeError("a pair must be a tuple")
        return super().score(prompt, reply)


class Lucky(Arithmetic):
    def score(self, prompt: Prompt, reply: str) -> Score:
        self.thrown = getattr(self, "thrown", 1.0) + 1.0
        return Score(self.thrown, "thrown")


class Lavish(Arithmetic):
    pass_reward = 0.5

    def score(self, prompt: Prompt, reply: str) -> Score:
        return Score(0.5, "whatever")


def test_a_check_finds_prompts_that_change_scores_by_chance_and_pay_for_nothing() -> None:
    sentences = [sentence for _, sentence in check(Forgetful(), 3).failures]
    for sentence, words in zip(sentences, ("made again", "can be sent", "a pair must be a tuple"), strict=True):
        assert words in sentence
    ((_, thrown),) = check(Lucky(), 1).failures
    assert "scored alike each time, got 2 (thrown) and then 3 (thrown)" in thrown
    ((_, paid),) = check(Lavish(), 1).failures
    assert "an empty reply must get less than the gold reply's 0.5, got 0.5 (whatever)" in paid


def test_a_reply_in_the_opening_is_an_example_and_bears_no_loss() -> None:
    chat = ByteChat()
    opening: list[Message] = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    turns: list[Message] = [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "4"},
    ]
    rows = episode_rows(chat, opening, turns)
    assert [row.text for row in rows if row.sampled] == ["5", "<end>", "4", "<end>"]
    text = "".join(row.text for row in rows).replace("<0x0A>", "|")
    assert text == (
        "<start>user|1+1<end><start>assistant|2<end><start>user|2+2<end><start>assistant|5<end>"
        "<start>user|no<end><start>assistant|4<end>"
    )
