"""What a task gives, held to what a task must give.

Invariant: a task may be anybody's own file, and programs and commands ask it through here. So whatever it raises, even
``sys.exit``, and whatever it gives of the wrong kind is a TaskFault that names the task and what was asked of it; a
reward that is no finite number is never taken for one, and means the same whoever asks.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echo2.data.task import Episode, Message, Played, Score, Split, Task
from echo2.errors import Echo2Error, TaskFault
from echo2.types import Prompt

MAX_STATUS_CHARS = 200
"""A status is counted and shown beside others; what is longer is no word for what happened."""

ENDINGS = (SystemExit, KeyboardInterrupt)
"""What a person's code may raise to end the program, which it may not, where Ctrl-C does not arrive as an exception."""


def told(error: BaseException) -> str:
    """Kind, words and place of an error in a person's own code."""
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    # A syntax error's words name file and line; one whose last frame is ours was made by the call itself.
    if len(frames) > 1 and frames[-1].filename != __file__ and not isinstance(error, SyntaxError):
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    words = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}{': ' if words else ''}{words}{place}"


def ended(error: BaseException) -> TaskFault:
    """What an attempt of a person's code to end the program becomes."""
    return TaskFault(f"a task must not end the program, it raised {told(error)}")


def size(task: Task, split: Split) -> int | None:
    with _asked(task, f"the size of split {split}"):
        found: object = task.size(split)
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 0):
        raise TaskFault(
            f"task {task.name} must give the size of split {split} as a number or None, got {_shown(found)}"
        )
    return found


def prompt(task: Task, split: Split, index: int) -> Prompt:
    with _asked(task, f"prompt {split}/{index}"):
        found: object = task.prompt(split, index)
    if not isinstance(found, Prompt) or not isinstance(found.prompt_id, str) or not isinstance(found.content, dict):
        raise TaskFault(f"task {task.name} must give prompt {split}/{index} as a Prompt, got {_shown(found)}")
    if found.task != task.name:
        raise TaskFault(
            f"task {task.name} must give prompts that bear its name, got {_shown(found.task)} in {found.prompt_id}; "
            "make them with self.name"
        )
    return found


def messages(task: Task, prompt: Prompt) -> list[Message]:
    """The opening; at least one message."""
    with _asked(task, f"the messages of {prompt.prompt_id}"):
        found: object = task.messages(prompt)
    return _messages(task, prompt, found)


def gold_reply(task: Task, prompt: Prompt) -> str | None:
    with _asked(task, f"the gold reply of {prompt.prompt_id}"):
        found: object = task.gold_reply(prompt)
    if found is not None and not isinstance(found, str):
        raise TaskFault(
            f"task {task.name} must give the gold reply of {prompt.prompt_id} as a text or None, got {_shown(found)}"
        )
    return found


def gold_talk(task: Task, prompt: Prompt) -> list[Message] | None:
    with _asked(task, f"the gold talk of {prompt.prompt_id}"):
        found: object = task.gold_talk(prompt)
    return None if found is None else _messages(task, prompt, found)


def score(task: Task, prompt: Prompt, reply: str) -> Score:
    try:
        with one_process():
            return checked(task.score(prompt, reply))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = error if isinstance(error, Echo2Error) else told(error)
        raise TaskFault(f"a reply to {prompt.prompt_id} cannot be scored: {reason}; in a run its row fails") from error


def agrees(task: Task, ours: Score, theirs: Score) -> bool:
    with _asked(task, "whether two scores agree"):
        return bool(task.agrees(ours, theirs))


def prompt_for_gold(task: Task, gold: str) -> Prompt:
    with _asked(task, "a prompt for a gold answer"):
        return task.prompt_for_gold(gold)


def table(task: Task, played: Sequence[Played], against: Sequence[Played] | None = None) -> list[dict[str, Any]]:
    with _asked(task, "its table"):
        found: object = task.table(played, against)
    if not isinstance(found, list) or not all(isinstance(row, Mapping) and row for row in found):
        raise TaskFault(f"task {task.name} must give its table as a list of rows, got {_shown(found)}")
    if len({tuple(row) for row in found}) > 1:
        raise TaskFault(f"task {task.name} must give all rows of its table the same columns, got {_shown(found)}")
    return found


def checked(score: object) -> Score:
    """The score, its reward as a float. Numbers of any library will do; truth values and texts will not."""
    if not isinstance(score, Score):
        if inspect.iscoroutine(score):
            score.close()
            raise TaskFault("score must be a plain function that returns a Score, got a coroutine; make it judge")
        raise TaskFault(f"a score must be a Score, got {_shown(score)}; return Score(reward, status)")
    if not isinstance(score.status, str) or len(score.status) > MAX_STATUS_CHARS:
        raise TaskFault(f"a status must be a text of at most {MAX_STATUS_CHARS} characters, got {_shown(score.status)}")
    reward: Any = score.reward
    if type(reward).__name__ in ("bool", "bool_") or not hasattr(type(reward), "__float__"):
        raise TaskFault(f"a reward must be a number, got {_shown(reward)}")
    try:
        number = float(reward)
    except Exception as error:
        raise TaskFault(f"a reward must be a number, got {_shown(reward)}: {type(error).__name__}: {error}") from error
    if not math.isfinite(number):
        raise TaskFault(f"a reward must be finite, got {number}")
    return score if type(reward) is float else Score(number, score.status)


def checked_episode(episode: object) -> Episode:
    """The episode, its reward as a float."""
    if not isinstance(episode, Episode):
        raise TaskFault(f"an episode must end in an Episode, got {_shown(episode)}; return Episode(score, omega)")
    if not isinstance(episode.omega, dict):
        raise TaskFault(f"the omega of an episode must be a dict, got {_shown(episode.omega)}")
    if not isinstance(episode.normalisation_key, str | None):
        raise TaskFault(f"a normalisation key must be a text or None, got {_shown(episode.normalisation_key)}")
    return Episode(checked(episode.score), episode.omega, episode.normalisation_key)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Where a person's code forked and came back twice, the copy ends here: it would go on as a second program."""
    before = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != before:
            os._exit(0)


@contextlib.contextmanager
def _asked(task: Task, what: str) -> Iterator[None]:
    try:
        with one_process():
            yield
    except (Echo2Error, KeyboardInterrupt):  # Ctrl-C, as far as anybody can tell
        raise
    except BaseException as error:
        raise TaskFault(f"task {task.name} must give {what}, it raised {told(error)}") from error


def _messages(task: Task, prompt: Prompt, found: object) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise TaskFault(
            f"task {task.name} must give the messages of {prompt.prompt_id} as a list of at least one, "
            f"got {_shown(found)}"
        )
    for message in found:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise TaskFault(
                f"task {task.name} must give the messages of {prompt.prompt_id} with texts as role and content, "
                f"got {_shown(message)}"
            )
    return found


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"something whose repr raised {type(error).__name__}"
    return f"{type(value).__name__} {text[:80]}" if value is not None else "None"
