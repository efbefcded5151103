"""What an environment of several turns is: a state machine that speaks text.

Invariant: pure. No clock, no I/O, no randomness but the seed's; the same seed and replies give the same game. A reply
that is no action changes nothing: ``step`` answers with a ``Fault``, and who drives the game decides what that costs.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """Whose turn it is, and what that seat may know."""

    seat: int
    state: str
    """s_t: text for the seat to act."""
    view: Any
    """The same for rule bots, as the game's own struct."""
    default: str
    """The action taken for a seat that gave none: the most harmless one, which is seldom the best."""
    replies: tuple[str, ...] = ()
    """Legal replies, one of every kind, for a player by chance; without any it takes ``default``."""


class Outcome(msgspec.Struct, frozen=True):
    """A reply was an action and was taken."""

    action: str
    """What was done, in the game's own words."""
    turn: Turn | None
    """None when the game is over."""


class Fault(msgspec.Struct, frozen=True):
    """A reply was no action. The game is where it was."""

    status: str
    """`unclear`: could not be read as one action; `illegal`: could, but the rules forbid it now."""
    reason: str
    """A sentence for whoever replied."""


class Sandbox(Protocol):
    """Options arrive as keyword arguments of ``__init__``; wrong ones raise ConfigError."""

    @property
    def seats(self) -> int: ...

    @property
    def rules(self) -> str:
        """How the game goes and how to reply; ``play.briefing`` adds what faults cost."""
        ...

    @property
    def currency(self) -> str:
        """What gains are counted in: chips, gold."""
        ...

    @property
    def default_rule(self) -> str:
        """What a turn's default action is, for players. Example: ``you hold``."""
        ...

    @property
    def fault_cost(self) -> float:
        """What a reply that is no action takes off the reward by default, in the unit of ``gain``."""
        ...

    @property
    def measure(self) -> tuple[str, float]:
        """Name of what people compare, and how much of it a gain of 1 in one game is: bb/100 in poker."""
        ...

    @property
    def bots(self) -> dict[str, Bot]:
        """Rule-based players by name."""
        ...

    def reset(self, seed: int) -> Turn:
        """Begin a new game."""
        ...

    def step(self, reply: str) -> Outcome | Fault:
        """The reply of the seat whose turn it is. Raises ValueError when the game is over."""
        ...

    def gain(self, seat: int) -> float:
        """What a seat has more than at the beginning; the gains of a finished game sum to zero over its seats."""
        ...

    def likeness(self, seat: int) -> str:
        """A coarse word for what a seat began with: games alike may share an average."""
        ...


class Bot(Protocol):
    """A rule-based player: (view, seeded random numbers) → action text."""

    def __call__(self, view: Any, draw: Any, /) -> str: ...
