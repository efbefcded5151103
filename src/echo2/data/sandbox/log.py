"""The raw log of a game, seen from one seat, and what it becomes: chat messages.

Invariant: L = [(s_t, a_t, r_t)]: what the seat read, what it said, and what its gain changed by from its last turn to
its next one (or the end), less what its faults cost. The rewards of a log sum to its return.

A log is a line of JSON; whoever recorded it, a policy, a rule bot or somebody else, it makes the same messages.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from echo2.data.task import Message
from echo2.errors import UserError


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    state: str
    """s_t"""
    action: str
    """a_t, as it was said."""
    reward: float
    """r_t"""
    taken: str = ""
    """What the sandbox did; empty for a reply that changed nothing."""
    fault: str = ""
    """`unclear` or `illegal`; empty for an action."""


class GameLog(msgspec.Struct, frozen=True, omit_defaults=True):
    """One game of one seat."""

    sandbox: str
    seed: int
    seat: int
    players: tuple[str, ...]
    """[seats] who played, by name; the seat's own among them."""
    rules: str
    """P_rules"""
    entries: tuple[Entry, ...]
    gain: float
    """Chips, gold: without what faults cost."""
    likeness: str = ""
    """Coarse word for what the seat began with."""

    @property
    def total(self) -> float:
        """R = Σ r_t"""
        return sum(entry.reward for entry in self.entries)

    @property
    def faults(self) -> int:
        return sum(bool(entry.fault) for entry in self.entries)


def messages_of(log: GameLog, *, with_rewards: bool = False) -> list[Message]:
    """M = [system rules, user state, assistant action, user state, …, assistant action].

    with_rewards: each state but the first opens with a line ``Reward: r`` of the turn before, for bookkeeping.
    """
    messages: list[Message] = [{"role": "system", "content": log.rules}]
    earned: float | None = None
    for entry in log.entries:
        told = f"Reward: {earned:g}\n" if with_rewards and earned is not None else ""
        messages.append({"role": "user", "content": told + entry.state})
        messages.append({"role": "assistant", "content": entry.action})
        earned = entry.reward
    return messages


def encode_logs(logs: Iterable[GameLog]) -> bytes:
    """JSONL"""
    return b"".join(msgspec.json.encode(log) + b"\n" for log in logs)


def read_logs(path: Path) -> Iterator[GameLog]:
    """Raises UserError for a file that cannot be read, naming the line that is no log."""
    try:
        lines: Sequence[bytes] = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise UserError(f"logs must be a readable JSONL file, got {str(path)!r}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            log = msgspec.json.decode(line, type=GameLog)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}, line {number}: must be the log of a game: {error}") from error
        if not log.entries:
            raise UserError(f"{path}, line {number}: a log must hold at least one turn, it holds none")
        yield log
