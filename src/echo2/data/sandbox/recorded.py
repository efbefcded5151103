"""Recorded games as training data: off-policy, and told so.

Invariant: a recorded reply keeps its text; it carries no log-probs, so no importance weight is made up for whoever said
it, and Ω names that player in ``recorded``. A prompt holds whole logs: a worker needs no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from echo2.data.sandbox.log import GameLog, messages_of, read_logs
from echo2.data.task import Episode, Score, Talk
from echo2.errors import ConfigError
from echo2.types import Prompt


class Recorded:
    """together: logs of one prompt, those of one deal and seat next to each other, so ``deal`` can compare them."""

    def __init__(self, path: str, together: int) -> None:
        logs = sorted(read_logs(Path(path)), key=lambda log: (log.sandbox, log.seed, log.seat))
        self.groups = [logs[first : first + together] for first in range(0, len(logs), together)]
        if not logs:
            raise ConfigError(f"logs_path must name a file with at least one recorded game, {path} holds none")

    def content(self, index: int) -> list[dict[str, Any]]:
        """Prompt ``index``'s logs as plain data."""
        return [msgspec.to_builtins(log) for log in self.groups[index]]


def log_at(prompt: Prompt, position: int) -> GameLog:
    """The log that the group's trajectory ``position`` recites; logs repeat where the group is larger."""
    logs = prompt.content["logs"]
    return msgspec.convert(logs[position % len(logs)], GameLog)


async def recite(log: GameLog, talk: Talk, key: str) -> Episode:
    """Say again what was said."""
    messages = messages_of(log)
    asked = messages[:1]
    for message in messages[1:]:
        if message["role"] == "assistant":
            talk.recite(asked, message["content"])
            asked = []
        else:
            asked.append(message)
    omega = {
        "recorded": log.players[log.seat],
        "seat": log.seat,
        "rewards": [entry.reward for entry in log.entries],
        "faults": log.faults,
    }
    return Episode(Score(log.total, "recorded"), omega, key)
