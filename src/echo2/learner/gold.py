"""Gold replies of a run's own prompts, for the warm start.

Invariant: what supervised step s learns from follows from the configuration and s alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.config.root import Config
from echo2.data import given
from echo2.data.chat import ByteChat, ChatFormat
from echo2.data.cursor import PromptCursor
from echo2.data.registry import load_tasks
from echo2.data.task import Message
from echo2.errors import ConfigError

if TYPE_CHECKING:
    from echo2.learning.warm_start import GoldBatches, GoldTalk

WARM_START_REPLIES = 32
"""Gold replies of one supervised step: enough for a steady gradient, few enough for a quick step."""
WARM_START_TRIES = 20
"""Prompts looked at for each reply before a task without gold replies is told."""


def gold_batches(config: Config, model_dir: Path) -> GoldBatches:
    """Supervised step → gold talks of the run's own prompts, a pure function of the step."""
    tasks = load_tasks(config.tasks)
    cursor = PromptCursor([(tasks[section.called], section.weight) for section in config.tasks], config.run.seed)
    chat = _chat(config, model_dir)

    def talks_of(step: int) -> list[GoldTalk]:
        talks: list[GoldTalk] = []
        first = step * WARM_START_REPLIES
        for position in range(first, first + WARM_START_REPLIES * WARM_START_TRIES):
            prompt = cursor.prompt(position)
            messages = given.gold_talk(tasks[prompt.task], prompt)
            if messages is not None:
                talks.append(gold_turns(messages, chat, config.rollout.thinking, config.learning.micro_batch_tokens))
            if sum(map(len, talks)) >= WARM_START_REPLIES:
                return talks
        if talks:
            return talks
        raise ConfigError(
            f"model.warm_start_steps is {config.model.warm_start_steps}, which needs a task with gold replies, and "
            f"{', '.join(tasks)} has none; set it to 0"
        )

    return talks_of


def gold_turns(messages: Sequence[Message], chat: ChatFormat, thinking: bool, most_tokens: int) -> GoldTalk:
    """Tokens of a conversation as an episode would feed and sample them, turn by turn.

    Turns beyond ``most_tokens`` are left out, the first apart: a long game must not decide how much memory it takes.
    """
    turns: list[tuple[list[int], list[int]]] = []
    asked: list[Message] = []
    held = 0
    for message in messages:
        if message["role"] != "assistant":
            asked.append(message)
            continue
        fed = (
            chat.extend(asked, turns[-1][1][-1], thinking=thinking) if turns else chat.render(asked, thinking=thinking)
        )
        reply = chat.encode_reply(message["content"])
        held += len(fed) + len(reply)
        if turns and held > most_tokens:
            break
        turns.append((fed, reply))
        asked = []
    return turns


def _chat(config: Config, model_dir: Path) -> ChatFormat:
    if config.rollout.engine == "scripted":
        return ByteChat()
    from echo2.data.template_chat import TemplateChat

    return TemplateChat(model_dir)
