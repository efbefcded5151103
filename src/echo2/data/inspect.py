"""What a task shows the policy and how it judges, for people: tokens with their loss mask, and a check of itself.

Invariant: pure. Everything is computed by the functions a run uses, so what is shown is what is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from echo2.data import given
from echo2.data.chat import ChatFormat
from echo2.data.rescoring import is_verifiable
from echo2.data.task import Message, Score, Split, Task
from echo2.errors import TaskFault, UserError
from echo2.types import Prompt

SCORED_TWICE = 20
"""Prompts of a split whose gold replies are scored again: scoring may be dear, and chance shows soon."""
SHOWN_CHARS = 200
"""Of a gold reply in a sentence."""


class TokenRow(msgspec.Struct, frozen=True):
    token_id: int
    text: str
    sampled: bool
    """The policy samples it: it bears loss (I8)."""


class Shown(msgspec.Struct, frozen=True):
    prompt: Prompt
    messages: list[Message]
    """The opening."""
    turns: list[Message]
    """What follows it in an episode of a good policy."""
    tokens: list[TokenRow]

    @property
    def reply(self) -> str:
        """The first gold reply; empty where there is none."""
        return self.turns[0]["content"] if self.turns else ""


class Check(msgspec.Struct, frozen=True):
    checked: int
    without_gold: int
    failures: list[tuple[str, str]]
    """(prompt id, what must hold and what was got)"""

    @property
    def passed(self) -> bool:
        """Something was checked, and nothing is wrong with it."""
        return self.checked + self.without_gold > 0 and not self.failures


def show(task: Task, chat: ChatFormat, index: int, *, split: Split = "train", thinking: bool = False) -> Shown:
    """Prompt ``index`` and a good policy's episode of it, token by token; without gold replies, the prompt alone."""
    prompt = given.prompt(task, split, index)
    messages, turns = given.messages(task, prompt), gold_turns(task, prompt)
    return Shown(prompt, messages, turns, episode_rows(chat, messages, turns, thinking=thinking))


def episode_rows(
    chat: ChatFormat, opening: Sequence[Message], turns: Sequence[Message], *, thinking: bool = False
) -> list[TokenRow]:
    """The tokens that training sees of an episode with these turns, built as a worker builds them: each turn is put
    after the last one's tokens. Replies in ``opening`` are examples, which nobody sampled."""
    token_ids = chat.render(opening, thinking=thinking)
    rows = _rows(chat, token_ids, False)
    between: list[Message] = []
    is_first = True
    for message in turns:
        if message["role"] != "assistant":
            between.append(message)
            continue
        fed = [] if is_first else chat.extend(between, token_ids[-1], thinking=thinking)
        said = chat.encode_reply(message["content"])
        rows += _rows(chat, fed, False) + _rows(chat, said, True)
        token_ids, between, is_first = [*token_ids, *fed, *said], [], False
    return rows


def _rows(chat: ChatFormat, token_ids: Sequence[int], sampled: bool) -> list[TokenRow]:
    return [TokenRow(token, chat.piece(token), sampled) for token in token_ids]


def gold_turns(task: Task, prompt: Prompt) -> list[Message]:
    """What follows the opening in a good episode: replies, and what the policy is told between them."""
    talk = given.gold_talk(task, prompt)
    return [] if talk is None else talk[len(given.messages(task, prompt)) :]


def check(task: Task, count: int, *, split: Split = "train", worker: Task | None = None) -> Check:
    """Look at the first ``count`` prompts: each must be the same when it is made again; as it arrives at a worker, its
    gold reply must get full marks each time it is scored, and an empty reply must not (single replies only).

    worker: the task as another machine makes it, which lacks its files; ``task`` itself where it has none.
    """
    worker = worker or task
    size = given.size(task, split)
    checked = without_gold = 0
    failures: list[tuple[str, str]] = []
    for index in range(count if size is None else min(count, size)):
        name = f"{split}/{index}"
        try:
            prompt = given.prompt(task, split, index)
            name = prompt.prompt_id
            arrived = _arrived(prompt, given.prompt(task, split, index))
            messages = given.messages(task, arrived)
            reply = given.gold_reply(task, arrived)
            if reply is None:
                without_gold += 1
                continue
            checked += 1
            early = checked <= SCORED_TWICE
            _check_scores(worker, arrived, reply, twice=early)
            if worker is not task and early:
                _check_messages(worker, arrived, messages)
        except TaskFault as fault:
            failures.append((name, str(fault)))
    return Check(checked, without_gold, failures)


def _arrived(prompt: Prompt, again: Prompt) -> Prompt:
    """The prompt as a worker gets it. Raises TaskFault."""
    try:
        sent = msgspec.msgpack.encode(prompt)
        arrived = msgspec.msgpack.decode(sent, type=Prompt)
    except Exception as error:  # whatever their values raise while they are encoded
        raise TaskFault(
            f"the prompt's content must be plain data that can be sent, got: {type(error).__name__}: {error}"
        ) from error
    if msgspec.msgpack.encode(again) != sent:
        raise TaskFault(
            "the prompt must be the same when it is made again: it may follow from options, split and index only"
        )
    return arrived


def _check_messages(worker: Task, prompt: Prompt, messages: list[Message]) -> None:
    """Raises TaskFault where another machine makes other messages of a prompt."""
    try:
        made: object = given.messages(worker, prompt)
    except UserError as fault:
        made = fault
    if made != messages:
        raise TaskFault(f"messages must follow from the prompt on a machine without files, got {made}")


def _check_scores(task: Task, prompt: Prompt, reply: str, *, twice: bool) -> None:
    """Raises TaskFault."""
    full = 1.0 if task.pass_reward is None else task.pass_reward
    judged = given.score(task, prompt, reply)
    if judged.reward < full:
        raise TaskFault(f"the gold reply {_cut(reply)} must get reward {full:g}, got {_told(judged)}")
    if not is_verifiable(task):
        return
    again = given.score(task, prompt, reply) if twice else judged
    if not given.agrees(task, judged, again):
        raise TaskFault(
            f"the gold reply {_cut(reply)} must be scored alike each time, got {_told(judged)} and then {_told(again)}:"
            " set verifiable = False where that cannot be"
        )
    try:
        empty = given.score(task, prompt, "")
    except TaskFault:
        return  # a row that fails is paid nothing
    if empty.reward >= full:
        raise TaskFault(f"an empty reply must get less than the gold reply's {full:g}, got {_told(empty)}")


def _told(judged: Score) -> str:
    return f"{judged.reward:g} ({judged.status})"


def _cut(reply: str) -> str:
    return repr(reply) if len(reply) <= SHOWN_CHARS else f"{reply[:SHOWN_CHARS]!r}…"
