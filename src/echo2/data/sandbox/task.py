"""Games as a task: an episode is one game of one seat, its reward the seat's gain less what its faults cost.

Invariant: a prompt holds everything a worker needs to play it: the deal, the seat, who else sits where. So all
trajectories of a group play the same deal from the same seat against the same opponents. In the held-out split every
deal is played from every seat against every opponent: duplicate deals, on which luck cancels.

The poker ``walk``, a game that ends before the policy had a turn, teaches nothing: another deal is played, until it has
one. What the first deal brought stands in Ω as ``gain``, so that evaluation counts it.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from math import inf
from pkgutil import iter_modules
from random import Random
from typing import Any, NamedTuple, get_args

from echo2.data.sandbox.catalogue import load_sandbox
from echo2.data.sandbox.keys import Normalise, normalisation_key
from echo2.data.sandbox.log import Entry, GameLog, messages_of
from echo2.data.sandbox.opponents import POLICY, Opponents
from echo2.data.sandbox.play import Faults, briefing, play
from echo2.data.sandbox.players import BotPlayer, Speaker
from echo2.data.sandbox.recorded import Recorded, log_at, recite
from echo2.data.sandbox.sandbox import Fault, Sandbox, Turn
from echo2.data.sandbox.table import compare, games_of
from echo2.data.task import Episode, Message, Played, Score, Split, Talk, Task
from echo2.errors import ConfigError
from echo2.types import Prompt

_COURSE = ("keys", "log", "opponents", "play", "players", "recorded", "replies", "sandbox")
"""Modules of this package that what happens in a game depends on."""

CHANCE = "chance"
"""Teacher that says any legal action."""
MOST_DEALS = 1000
"""Of one episode: an opponent that folds everything would otherwise never let the policy act."""


class SandboxTask(Task):
    """sandbox: ``poker``, ``moba`` or ``module:Class``.  settings: the sandbox's own options.

    opponents: bots of the sandbox by name, or tables with ``name``, ``weight``, and for a model ``model``
    (``module:Class``) and ``options``; each game draws from them. All bots alike by default.
    normalise: whose returns an advantage is measured against: ``deal`` (the group: same cards, seat and opponents),
    ``similar`` (games of the batch with a like start and the same opponents), ``batch`` (all of the batch).
    retries: how often a reply that is no action is asked for again.  fault_price: what each costs, in the sandbox's own
    prices (a big blind, ten gold).  teacher: who gives the gold replies of checks and warm starts: a bot, by default
    the sandbox's last, or ``chance``, any legal action: how to speak, not how to play.
    logs_path: recorded games (JSONL) to train on instead of playing.  logs_together: how many make a group; the run's
    group size, or some are said twice.  seed: which deals, seats and opponents come.
    """

    def __init__(
        self,
        *,
        sandbox: str = "poker",
        settings: dict[str, Any] | None = None,
        opponents: list[str | dict[str, Any]] | None = None,
        normalise: Normalise = "deal",
        retries: int = 1,
        fault_price: float = 1.0,
        teacher: str = "",
        logs_path: str = "",
        logs_together: int = 8,
        seed: int = 0,
    ) -> None:
        if not isinstance(sandbox, str) or not isinstance(settings or {}, dict):
            raise ConfigError(f"sandbox must be a name and settings a table, got {sandbox!r} and {settings!r}")
        self._sandbox, self._settings = sandbox, settings or {}
        game = self._new()
        faults = []
        if normalise not in get_args(Normalise):
            faults.append(f"normalise must be one of {', '.join(get_args(Normalise))}, got {normalise!r}")
        for key, value, least in (("retries", retries, 0), ("seed", seed, 0), ("logs_together", logs_together, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
                faults.append(f"{key} must be an integer of at least {least}, got {value!r}")
        if not isinstance(fault_price, int | float) or isinstance(fault_price, bool) or not 0 < fault_price < inf:
            faults.append(f"fault_price must be a number above 0, got {fault_price!r}")
        if teacher and teacher not in (*game.bots, CHANCE):
            faults.append(f"teacher must be one of {', '.join(game.bots)}, {CHANCE}, got {teacher!r}")
        if faults:
            raise ConfigError([f"sandbox {sandbox}: {fault}" for fault in faults])
        self._faults = Faults(retries, fault_price * game.fault_cost)
        self._rules = briefing(game, self._faults)
        self._opponents = Opponents(opponents or list(game.bots), game.bots)
        self.verifiable = not self._opponents.has_models
        self._normalise, self._seed = normalise, seed
        self._teacher = teacher or list(game.bots)[-1]
        self._logs_path, self._logs_together = logs_path, logs_together

    # ---- prompts -----------------------------------------------------------------------------------------------

    def size(self, split: Split) -> int | None:
        return len(self._recorded.groups) if self._logs_path and split == "train" else None

    def prompt(self, split: Split, index: int) -> Prompt:
        prompt_id = f"{self.name}/{split}/{index}"
        if self._logs_path and split == "train":
            return Prompt(prompt_id, self.name, {"logs": self._recorded.content(index)})
        seats = self._new().seats
        if split == "eval":
            deal, rest = divmod(index, seats * len(self._opponents.names))
            column, seat = divmod(rest, seats)
            others = [self._opponents.names[column]] * (seats - 1)
        else:
            deal = index
            draw = Random(f"{self._seed}/{split}/{index}")
            seat = draw.randrange(seats)
            others = self._opponents.draw(seats - 1, draw)
        players = [*others[:seat], POLICY, *others[seat:]]
        content = {"deal": _deal_seed(self._seed, split, deal), "seat": seat, "players": players}
        return Prompt(prompt_id, self.name, content)

    def messages(self, prompt: Prompt) -> list[Message]:
        """The rules and the first state the seat gets where rule bots sit; models are taken to do the default."""
        if "logs" in prompt.content:
            return messages_of(log_at(prompt, 0))[:2]
        turn = self._opening(prompt).turn
        return [{"role": "system", "content": self._rules}, {"role": "user", "content": turn.state}]

    def score(self, prompt: Prompt, reply: str) -> Score:
        """Whether a first reply is a legal action: 1 or 0. A whole game is scored by ``rollout``."""
        if "logs" in prompt.content:
            return Score(1.0, "recorded")
        done = self._opening(prompt).game.step(reply)
        return Score(0.0, done.status) if isinstance(done, Fault) else Score(1.0, "legal")

    def gold_reply(self, prompt: Prompt) -> str | None:
        if "logs" in prompt.content:
            return log_at(prompt, 0).entries[0].action
        opening = self._opening(prompt)
        return self._taught(opening.game, opening.turn, _teachers_draw(prompt))

    def gold_talk(self, prompt: Prompt) -> list[Message] | None:
        """The teacher's whole game against the prompt's rule bots; models are taken to do the default."""
        if "logs" in prompt.content:
            return messages_of(log_at(prompt, 0))
        opening, draw = self._opening(prompt), _teachers_draw(prompt)
        game, seat = opening.game, prompt.content["seat"]
        talk: list[Message] = [{"role": "system", "content": self._rules}]
        turn: Turn | None = opening.turn
        while turn is not None:
            reply = self._taught(game, turn, draw) if turn.seat == seat else opening.other(turn)
            if turn.seat == seat:
                talk += [{"role": "user", "content": turn.state}, {"role": "assistant", "content": reply}]
            turn = _taken(game, reply)
        return talk

    # ---- episodes ----------------------------------------------------------------------------------------------

    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        if "logs" in prompt.content:
            log = log_at(prompt, talk.position)
            return await recite(log, talk, normalisation_key(log, self._normalise))
        log, first_gain, deals = await self._play(prompt, talk)
        status = "won" if log.total > 0 else "lost" if log.total < 0 else "even"
        omega = {
            "opponents": [name for place, name in enumerate(log.players) if place != log.seat],
            "gain": first_gain,
            "seat": log.seat,
            "deal": prompt.content["deal"],
            "deals": deals,
            "rewards": [entry.reward for entry in log.entries],
            "faults": log.faults,
        }
        # A deal is its group's own: None leaves equal returns visible to the buffer as a group without signal.
        key = None if self._normalise == "deal" else normalisation_key(log, self._normalise)
        return Episode(Score(log.total, status), omega, key)

    async def record(self, count: int) -> AsyncIterator[GameLog]:
        """Play ``count`` games of the opponents among themselves; the log of every seat that had a turn.

        ``logs_together`` games share a deal, so that those who recite them are measured against each other.
        """
        game = self._new()
        for number in range(count):
            deal = _deal_seed(self._seed, "record", number // self._logs_together)
            names = tuple(self._opponents.draw(game.seats, Random(f"{self._seed}/record/{number}")))
            turn = game.reset(deal)
            players = [self._opponents.player(name, number, seat, self._rules) for seat, name in enumerate(names)]
            for seat, entries in enumerate(await play(game, turn, players, self._faults)):
                if entries:
                    yield self._log(game, deal, seat, names, entries)

    def table(self, played: Sequence[Played], against: Sequence[Played] | None = None) -> list[dict[str, Any]]:
        """Per opponent: gain per game (the paper's Table 4) and the sandbox's measure with its 95 % interval."""
        game = self._new()
        other = None if against is None else games_of(against)
        return compare(games_of(played), game.seats, *game.measure, against=other)

    def judging_modules(self) -> Sequence[str]:
        """What a game's course depends on: this package's modules, the sandbox's own, and those in its folder."""
        package = __name__.rpartition(".")[0]
        found = {f"{package}.{name}" for name in _COURSE}
        for kind in type(self._new()).__mro__[:-1]:
            found.add(kind.__module__)
            folder = kind.__module__.rpartition(".")[0]
            if folder.startswith(f"{package}."):
                found |= {f"{folder}.{module.name}" for module in iter_modules(sys.modules[folder].__path__)}
        return sorted(found)

    # ---- games -------------------------------------------------------------------------------------------------

    @cached_property
    def _recorded(self) -> Recorded:
        return Recorded(self._logs_path, self._logs_together)

    def _new(self) -> Sandbox:
        return load_sandbox(self._sandbox, self._settings)

    def _log(self, game: Sandbox, seed: int, seat: int, names: tuple[str, ...], entries: tuple[Entry, ...]) -> GameLog:
        gain, likeness = game.gain(seat), game.likeness(seat)
        return GameLog(self._sandbox, seed, seat, names, self._rules, entries, gain, likeness)

    def _taught(self, game: Sandbox, turn: Turn, draw: Random) -> str:
        if self._teacher == CHANCE:
            return draw.choice(turn.replies or (turn.default,))
        return game.bots[self._teacher](turn.view, draw)

    def _opening(self, prompt: Prompt) -> _Opening:
        seat, names = prompt.content["seat"], prompt.content["players"]
        for again in range(MOST_DEALS):
            game, seed = self._new(), _again(prompt.content["deal"], again)
            turn: Turn | None = game.reset(seed)
            bots = [self._opponents.bot(name, seed, place) for place, name in enumerate(names)]
            while turn is not None and turn.seat != seat:
                turn = _taken(game, _by_rule(bots[turn.seat], turn))
            if turn is not None:
                return _Opening(game, turn, bots)
        raise _never(seat)

    async def _play(self, prompt: Prompt, talk: Talk) -> tuple[GameLog, float, int]:
        """The log of the first deal in which the seat had a turn, the gain of the first deal of all, deals played."""
        seat, names = prompt.content["seat"], tuple(prompt.content["players"])
        game = self._new()
        first_gain = 0.0
        for again in range(MOST_DEALS):
            seed = _again(prompt.content["deal"], again)
            turn = game.reset(seed)
            players = [
                Speaker(talk.say, self._rules)
                if name == POLICY
                else self._opponents.player(name, seed, place, self._rules)
                for place, name in enumerate(names)
            ]
            entries = (await play(game, turn, players, self._faults))[seat]
            first_gain = game.gain(seat) if again == 0 else first_gain
            if entries:
                return self._log(game, seed, seat, names, entries), first_gain, again + 1
            await asyncio.sleep(0)  # rule bots alone never wait: let others run
        raise _never(seat)


class _Opening(NamedTuple):
    """A game in which it is the policy's first turn."""

    game: Sandbox
    turn: Turn
    bots: list[BotPlayer | None]
    """[seats] None where the policy or a model sits"""

    def other(self, turn: Turn) -> str:
        return _by_rule(self.bots[turn.seat], turn)


def _by_rule(bot: BotPlayer | None, turn: Turn) -> str:
    return turn.default if bot is None else bot.answer(turn)


def _taken(game: Sandbox, reply: str) -> Turn | None:
    done = game.step(reply)
    assert not isinstance(done, Fault), "bots say what is legal"
    return done.turn


def _teachers_draw(prompt: Prompt) -> Random:
    return Random(f"teacher/{prompt.content['deal']}")


def _deal_seed(seed: int, split: str, index: int) -> int:
    """40 bits, so that seeds of later deals stay exact in every reader."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{split}/{index}".encode(), digest_size=5).digest(), "little")


def _again(deal: int, again: int) -> int:
    return deal * MOST_DEALS + again


def _never(seat: int) -> ValueError:
    return ValueError(f"seat {seat} must have a turn, it had none in {MOST_DEALS} deals: take other opponents")
