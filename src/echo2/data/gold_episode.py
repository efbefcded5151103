"""Episodes of a task's own ``rollout`` whose replies are known: those of its gold talk, and empty ones.

Invariant: no model is asked. A gold talk is what a warm start learns and what people are shown, so an episode in which
the policy says its replies must be that conversation, message by message; and no reply, however poor, may be an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import repeat

from echo2.data import given
from echo2.data.task import Episode, Message, Split, Task
from echo2.errors import TaskFault
from echo2.types import Prompt

EPISODES = 5
"""Prompts of a split whose episodes are played."""
EPISODE_S = 60.0
"""For an episode whose policy answers at once."""
MOST_REPLIES = 10_000
"""Of a policy that says nothing: an episode must end by itself."""


class _Speechless(Exception):
    """The policy was asked for more than it has to say."""


class _Actor:
    """A ``Talk`` whose policy says ``replies``, one after the other."""

    position = 0

    def __init__(self, replies: Iterator[str]) -> None:
        self.heard: list[tuple[str, str]] = []
        """(role, content) of everything that was said so far"""
        self._replies = replies

    async def say(self, messages: Sequence[Message]) -> str:
        reply = next(self._replies, None)
        if reply is None:
            raise _Speechless
        self.recite(messages, reply)
        return reply

    def recite(self, messages: Sequence[Message], reply: str) -> None:
        self.heard += [*_plain(messages), ("assistant", reply)]


def has_episodes(task: Task) -> bool:
    """Whether there is more to play than one reply, and nobody else has a say in it."""
    return task.verifiable and type(task).rollout is not Task.rollout


async def check_episodes(
    task: Task, *, split: Split = "train", worker: Task | None = None
) -> tuple[int, list[tuple[str, str]]]:
    """Episodes played, and (prompt id, what must hold and what was got) of those that have a fault.

    worker: the task as another machine makes it; ``task`` itself where it has no files.
    """
    worker = worker or task
    played = 0
    failures: list[tuple[str, str]] = []
    if not has_episodes(task):
        return played, failures
    size = given.size(task, split)
    for index in range(EPISODES if size is None else min(EPISODES, size)):
        name = f"{split}/{index}"
        try:
            prompt = given.prompt(task, split, index)
            name = prompt.prompt_id
            gold = given.gold_talk(task, prompt)
            faults = [] if gold is None else [await _gold_fault(worker, prompt, gold)]
            faults.append(await _silent_fault(worker, prompt))
        except TaskFault as fault:
            failures.append((name, str(fault)))
            continue
        played += len(faults)
        failures += [(name, fault) for fault in faults if fault]
    return played, failures


async def _gold_fault(task: Task, prompt: Prompt, gold: Sequence[Message]) -> str:
    wanted, opening = _plain(gold), len(given.messages(task, prompt))
    replies = [content for role, content in wanted[opening:] if role == "assistant"]
    actor = _Actor(iter(replies))
    what = "an episode of the gold talk's replies"
    episode = await _played(task, prompt, actor)
    for number, (said, want) in enumerate(zip(actor.heard, wanted, strict=False), 1):
        if said != want:
            return f"{what} must be the gold talk, got {said} in place of {want} as message {number}"
    if isinstance(episode, _Speechless):
        return f"{what} must end with the last of them, it asked for one more after {len(replies)}"
    if isinstance(episode, Exception):
        return f"{what} must end with a finite reward, got {_told(episode)}"
    if len(actor.heard) < len(wanted):
        return f"{what} must be the gold talk, it ended after {len(actor.heard)} of {len(wanted)} messages"
    if task.pass_reward is not None and episode.score.reward < task.pass_reward:
        return f"{what} must get reward {task.pass_reward:g}, got {_told(episode)}"
    return ""


async def _silent_fault(task: Task, prompt: Prompt) -> str:
    what = "an episode of empty replies"
    episode = await _played(task, prompt, _Actor(repeat("", MOST_REPLIES)))
    if isinstance(episode, _Speechless):
        return f"{what} must end by itself, it went on after {MOST_REPLIES:,}"
    if isinstance(episode, Exception):
        return f"{what} must end with a finite reward, got {_told(episode)}"
    return ""


async def _played(task: Task, prompt: Prompt, actor: _Actor) -> Episode | Exception:
    try:
        async with asyncio.timeout(EPISODE_S):
            return given.checked_episode(await task.rollout(prompt, actor))
    except SystemExit as error:
        return given.ended(error)
    except Exception as error:  # people's own code
        return error


def _plain(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _told(episode: Episode | Exception) -> str:
    if isinstance(episode, TaskFault):
        return str(episode)
    if isinstance(episode, Exception):
        return f"{type(episode).__name__}: {episode}"
    return f"{episode.score.reward:g} ({episode.score.status})"
