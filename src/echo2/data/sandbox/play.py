"""A game from first turn to last: sandbox and players in, one log per seat out.

Invariant: every turn ends in exactly one action. A reply that is none costs its seat the price of a fault and is asked
for again ``retries`` times; after that the turn's default action is taken, so a fault is neither a crash nor free.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import msgspec

from echo2.data.sandbox.log import Entry
from echo2.data.sandbox.players import Player, asked
from echo2.data.sandbox.sandbox import Fault, Outcome, Sandbox, Turn

TURNS_AT_A_TIME = 64
"""Rule bots never wait: without a pause a game of theirs that does not end could not even be given up."""


class Faults(msgspec.Struct, frozen=True):
    """What becomes of replies that are no action."""

    retries: int
    """How often a turn is asked for again."""
    price: float
    """What each takes off its seat's reward, in the unit of ``gain``."""


def briefing(sandbox: Sandbox, faults: Faults) -> str:
    """P_rules: the sandbox's rules, and what becomes of a reply that is no action. The system message."""
    again = {0: "", 1: " and you are asked once more"}.get(
        faults.retries, f" and you are asked again, {faults.retries} times at most"
    )
    return (
        f"{sandbox.rules} A reply that is no legal action costs {faults.price:g} {sandbox.currency}{again};"
        f" then {sandbox.default_rule}."
    )


class _Seat:
    """What one seat said; rewards follow as they are known."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.gain = 0.0
        """At its last turn."""

    def settle(self, gain: float) -> None:
        """What changed since its last turn belongs to the last thing it said."""
        if self.entries:
            last = self.entries[-1]
            self.entries[-1] = msgspec.structs.replace(last, reward=last.reward + gain - self.gain)
            self.gain = gain


async def play(sandbox: Sandbox, turn: Turn, players: Sequence[Player], faults: Faults) -> list[tuple[Entry, ...]]:
    """[seats] entries of a game that was just reset; empty for a seat that never had a turn.

    Raises ValueError for a game whose gains do not sum to zero: its rewards would pay for what nobody lost.
    """
    seats = [_Seat() for _ in players]
    coming: Turn | None = turn
    taken = 0
    while coming is not None:
        taken += 1
        if taken % TURNS_AT_A_TIME == 0:
            await asyncio.sleep(0)
        seats[coming.seat].settle(sandbox.gain(coming.seat))
        coming = (await _act(sandbox, coming, players[coming.seat], seats[coming.seat], faults)).turn
    gains = [sandbox.gain(number) for number in range(len(seats))]
    if not math.isclose(sum(gains), 0.0, abs_tol=1e-6):
        raise ValueError(f"the gains of a finished game must sum to zero over its seats, got {gains}")
    for seat, gain in zip(seats, gains, strict=True):
        seat.settle(gain)
    return [tuple(seat.entries) for seat in seats]


async def _act(sandbox: Sandbox, turn: Turn, player: Player, seat: _Seat, faults: Faults) -> Outcome:
    note = ""
    for tries_left in range(faults.retries, -1, -1):
        reply = await player.reply(turn, note)
        done = sandbox.step(reply)
        if isinstance(done, Outcome):
            seat.entries.append(Entry(asked(turn, note), reply, 0.0, taken=done.action))
            return done
        forced = None if tries_left else sandbox.step(turn.default)
        assert not isinstance(forced, Fault), "a default is always legal"
        taken = forced.action if forced else ""
        seat.entries.append(Entry(asked(turn, note), reply, -faults.price, taken, done.status))
        if forced:
            return forced
        note = f"That was no action. {done.reason}"
    raise AssertionError("the last try ends in an action")
