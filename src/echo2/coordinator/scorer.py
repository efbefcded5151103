"""The process that scores replies again, for the coordinator at the other end of its standard input and output.

Invariant: one question, one answer, in order. For a reply that takes longer than ``SCORE_S`` the kernel ends the
process, also where a task's ``score`` keeps the interpreter to itself. The process ends with the coordinator.

    python -m echo2.coordinator.scorer RUN_FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from echo2.data.chat import ByteChat, ChatFormat
from echo2.data.frames import LENGTH_BYTES, packed
from echo2.data.given import ENDINGS, checked, ended
from echo2.data.registry import load_tasks
from echo2.data.task import Score, Task
from echo2.errors import TaskFault
from echo2.run.folder import RunFolder
from echo2.types import TOKEN_DTYPE, Prompt

SCORE_S = 30.0
"""Longest time for one reply."""
POLITENESS = 10
"""Niceness once it is ready: the programs of the run come first."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    prompt: Prompt
    reply: bytes
    """[L] uint32 token ids."""


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    reward: float
    status: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """This reply got no score."""

    reason: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Said first, once."""


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """Said first: nothing can be scored here."""

    reason: str


Answer = Told | Failed | Ready | Broken


def main(root: Path) -> int:
    asks, answers = _take_over_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the coordinator, which decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        tasks, chat = _opened(root)
    except Exception as error:
        _say(answers, Broken(f"{type(error).__name__}: {error}"))
        return 1
    with contextlib.suppress(OSError):
        os.nice(POLITENESS)
    _say(answers, Ready())
    with asyncio.Runner() as runner:
        while (ask := _next(asks)) is not None:
            signal.setitimer(signal.ITIMER_REAL, SCORE_S)
            answer = _scored(tasks, chat, ask, runner)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _say(answers, answer)
    return 0


def _opened(root: Path) -> tuple[Mapping[str, Task], ChatFormat]:
    """As a worker opens them."""
    config = RunFolder(root).load()
    tasks = load_tasks(config.tasks)
    if config.rollout.engine == "scripted":
        return tasks, ByteChat()
    from echo2.data.template_chat import TemplateChat

    return tasks, TemplateChat(root / "assets")


def _scored(tasks: Mapping[str, Task], chat: ChatFormat, ask: Ask, runner: asyncio.Runner) -> Told | Failed:
    try:
        reply = chat.decode(np.frombuffer(ask.reply, TOKEN_DTYPE).tolist())
        score = checked(runner.run(_judged(tasks[ask.prompt.task], ask.prompt, reply)))
    except TaskFault as error:
        return Failed(str(error)[:300])
    except Exception as error:
        return Failed(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    return Told(score.reward, score.status)


async def _judged(task: Task, prompt: Prompt, reply: str) -> Score:
    try:
        return await task.judge(prompt, reply)
    except ENDINGS as error:
        raise ended(error) from error


def _next(asks: BinaryIO) -> Ask | None:
    """None when the coordinator is gone."""
    head = asks.read(LENGTH_BYTES)
    body = asks.read(int.from_bytes(head, "big")) if len(head) == LENGTH_BYTES else b""
    return msgspec.msgpack.decode(body, type=Ask) if body else None


def _say(answers: BinaryIO, answer: Answer) -> None:
    answers.write(packed(answer))
    answers.flush()


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Questions and answers; what a task prints goes to standard error."""
    asks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return asks, answers


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
