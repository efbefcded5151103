"""The mixture of opponents of a run.

Invariant: who sits in a game follows from the prompt alone. Drawing happens when a prompt is made, so the
trajectories of a group meet the same opponents, and a worker draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from typing import Any

import msgspec

from echo2.data.sandbox.catalogue import load_model
from echo2.data.sandbox.players import BotPlayer, Memory, Player, Speaker, TextModel
from echo2.data.sandbox.sandbox import Bot
from echo2.errors import ConfigError

POLICY = "policy"
"""Name of the seat that is trained."""


class Opponent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the option ``opponents``."""

    name: str
    """A bot of the sandbox; with ``model``, what the model is called in tables."""
    weight: float = 1.0
    """Share of the games, relative to the others."""
    model: str = ""
    """``module:Class`` that answers conversations."""
    options: dict[str, Any] = {}
    """Keyword arguments of ``model``."""


class Opponents:
    """Raises ConfigError for opponents that cannot be had; models are made when the first game wants them."""

    def __init__(self, entries: Sequence[str | dict[str, Any]], bots: Mapping[str, Bot]) -> None:
        self._bots = bots
        self._models: dict[str, TextModel] = {}
        parsed = [_parsed(entry) for entry in entries]
        self._by_name = {opponent.name: opponent for opponent in parsed}
        faults = [
            f"opponent {opponent.name!r} must be one of {', '.join(bots)}, or name its model"
            for opponent in parsed
            if not opponent.model and opponent.name not in bots
        ]
        faults += [
            f"opponent {o.name!r}: weight must be above 0, got {o.weight:g}" for o in parsed if not 0 < o.weight < inf
        ]
        if POLICY in self._by_name or len(self._by_name) != len(parsed):
            faults.append(f"opponents must have different names, none of them {POLICY!r}")
        if not parsed:
            faults.append("opponents must name at least one, got none")
        if faults:
            raise ConfigError(faults)

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    @property
    def has_models(self) -> bool:
        """Whether somebody plays whose replies do not follow from the seed."""
        return any(opponent.model for opponent in self._by_name.values())

    def draw(self, seats: int, draw: Random) -> list[str]:
        """[seats] names by weight"""
        return draw.choices(self.names, [opponent.weight for opponent in self._by_name.values()], k=seats)

    def bot(self, name: str, seed: int, seat: int) -> BotPlayer | None:
        """The rule bot of a seat; None where a model sits, or the policy."""
        if name == POLICY or self._by_name[name].model:
            return None
        return BotPlayer(self._bots[name], f"{seed}/{seat}/{name}")

    def player(self, name: str, seed: int, seat: int, rules: str) -> Player:
        """Whoever is called ``name``, seated for one game."""
        bot = self.bot(name, seed, seat)
        if bot is not None:
            return bot
        if name not in self._models:
            opponent = self._by_name[name]
            self._models[name] = load_model(opponent.model, opponent.options)
        return Speaker(Memory(self._models[name]), rules)


def _parsed(entry: str | dict[str, Any]) -> Opponent:
    try:
        return Opponent(entry) if isinstance(entry, str) else msgspec.convert(entry, Opponent)
    except msgspec.ValidationError as error:
        raise ConfigError(f"opponents must be names or tables of name, weight, model, options: {error}") from error
