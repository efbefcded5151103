"""What a task shows the policy and how it judges, for people: tokens with their loss mask, and a check on gold replies.

Invariant: pure. Everything is computed by the functions a run uses, so what is shown is what is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from echo2.data.chat import ChatFormat
from echo2.data.task import Message, Score, Split, Task
from echo2.types import Prompt


class TokenRow(msgspec.Struct, frozen=True):
    token_id: int
    text: str
    sampled: bool
    """The policy samples it: it bears loss (I8)."""


class Shown(msgspec.Struct, frozen=True):
    prompt: Prompt
    messages: list[Message]
    reply: str
    tokens: list[TokenRow]


class Check(msgspec.Struct, frozen=True):
    checked: int
    without_gold: int
    failures: list[tuple[str, str, Score | str]]
    """(prompt id, gold reply, its score or the error)"""
    unsteady: list[str] = []
    """Prompts that were others when they were asked for again."""

    @property
    def passed(self) -> bool:
        """Something was checked, and nothing is wrong with it."""
        return self.checked + self.without_gold > 0 and not self.failures and not self.unsteady


def show(task: Task, chat: ChatFormat, index: int, *, split: Split = "train", thinking: bool = False) -> Shown:
    """Prompt ``index`` and its gold reply, token by token; without a gold reply, the prompt alone."""
    prompt = task.prompt(split, index)
    messages = task.messages(prompt)
    reply = task.gold_reply(prompt)
    rows = token_rows(chat, [(chat.render(messages, thinking=thinking), False)])
    if reply is not None:
        rows += token_rows(chat, [(chat.encode_reply(reply), True)])
    return Shown(prompt, messages, reply or "", rows)


def token_rows(chat: ChatFormat, segments: Sequence[tuple[Sequence[int], bool]]) -> list[TokenRow]:
    return [TokenRow(token, chat.piece(token), sampled) for token_ids, sampled in segments for token in token_ids]


def check(task: Task, count: int, *, split: Split = "train") -> Check:
    """Score the gold replies of the first ``count`` prompts: each must get reward 1, and each prompt must repeat."""
    size = task.size(split)
    checked = without_gold = 0
    failures: list[tuple[str, str, Score | str]] = []
    unsteady: list[str] = []
    for index in range(count if size is None else min(count, size)):
        prompt = task.prompt(split, index)
        if task.prompt(split, index) != prompt:
            unsteady.append(prompt.prompt_id)
        reply = task.gold_reply(prompt)
        if reply is None:
            without_gold += 1
            continue
        checked += 1
        try:
            score = task.score(prompt, reply)
        except Exception as error:
            failures.append((prompt.prompt_id, reply, f"{type(error).__name__}: {error}"))
            continue
        if score.reward != 1.0:
            failures.append((prompt.prompt_id, reply, score))
    return Check(checked, without_gold, failures, unsteady)
