from __future__ import annotations

from echo2.config.sections import TaskSection
from echo2.data.chat import ByteChat
from echo2.data.inspect import check, show
from echo2.data.registry import load_task
from echo2.data.task import Score, Split
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
    assert {outcome if isinstance(outcome, str) else outcome.reward for _, _, outcome in result.failures} == {
        "ValueError: ones are hard",
        0.5,
    }


class Restless(Arithmetic):
    def prompt(self, split: Split, index: int) -> Prompt:
        self.asked = getattr(self, "asked", 0) + 1
        return super().prompt(split, index + self.asked % 2)


def test_a_check_names_every_prompt_that_does_not_repeat() -> None:
    result = check(Restless(max_operand=9), 3)

    assert not result.passed
    assert result.failures == []
    assert len(result.unsteady) == 3


class Unknowing(Arithmetic):
    def gold_reply(self, prompt: Prompt) -> None:  # type: ignore[override]
        return None


def test_a_task_without_gold_replies_passes_when_its_prompts_repeat() -> None:
    result = check(Unknowing(max_operand=9), 3)

    assert (result.passed, result.checked, result.without_gold) == (True, 0, 3)
