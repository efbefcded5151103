"""What a player reads: the rules, and the state of a hand.

Invariant: a state text holds what its seat may know and nothing else; other players appear by position and by what they
did, never in their own words, so no reply of one player is read by another.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from echo2.data.sandbox.poker.actions import Bounds

_MIDDLE = ("under the gun", "middle position", "cutoff")


class Opponent(msgspec.Struct, frozen=True):
    position: str
    stack: int
    in_front: int
    live: bool


class View(msgspec.Struct, frozen=True):
    """What a seat knows when it is to act."""

    hole: tuple[str, str]
    board: tuple[str, ...]
    street: str
    position: str
    pot: int
    """With this street's bets."""
    bounds: Bounds
    big_blind: int
    opponents: tuple[Opponent, ...]
    raises: int
    """Bets and raises so far on this street, blinds aside."""
    events: tuple[str, ...]
    """What happened since the seat's last turn."""

    @property
    def rivals(self) -> int:
        """Opponents who have not folded."""
        return sum(opponent.live for opponent in self.opponents)

    @property
    def pot_odds(self) -> float:
        """Share of the final pot that a call costs: equity above it makes the call pay."""
        return self.bounds.to_call / (self.pot + self.bounds.to_call) if self.bounds.to_call else 0.0


def positions(players: int) -> tuple[str, ...]:
    """Names by place: the first acts first after the flop, the button is last."""
    if players == 2:
        return ("big blind", "button")
    middle = {3: (), 4: _MIDDLE[:1], 5: (_MIDDLE[0], _MIDDLE[2]), 6: _MIDDLE}[players]
    return ("small blind", "big blind", *middle, "button")


def rules_text(players: int, blinds: tuple[int, int], brief: bool = False) -> str:
    small, big = blinds
    if brief:
        return f"Hold'em, {players} players, blinds {small}/{big}. Reply with one action."
    button = " The button posts the small blind." if players == 2 else ""
    return (
        f"You play No-Limit Texas Hold'em, {players} players, blinds {small}/{big}.{button} Win as many chips as you"
        " can. Each turn shows your hand and the table. Reply with one line: 'Action: ' and one of fold, check, call,"
        " bet N, raise to N, all-in. N is the total you will then have in front of you on this street, in whole chips."
    )


def state_text(view: View) -> str:
    """Example of the first line: ``Hand: [Ah, Kd], Board: [Qs, Th, 2c], Pot: 100``."""
    bounds = view.bounds
    lines = list(view.events)
    lines.append(f"Hand: {_cards(view.hole)}, Board: {_cards(view.board)}, Pot: {view.pot}")
    lines.append(
        f"{view.street.capitalize()}, you are {view.position}: {bounds.stack} behind, {bounds.in_front} in front."
    )
    lines += [
        f"{other.position.capitalize()}: {other.stack} behind, {other.in_front} in front"
        + ("." if other.live else ", folded.")
        for other in view.opponents
    ]
    if bounds.to_call:
        lines.append(f"To call: {bounds.to_call}. Pot odds: {100 * view.pot_odds:.1f} %.")
    lines.append(f"You may: {bounds}.")
    return "\n".join(lines)


def brief_text(view: View) -> str:
    """One line, without what others did and have. Example: ``button: Ah Kd / Qs Th 2c, pot 6, 8 behind: check, bet 2``.

    What others put in shows in the pot and in the price of a call.
    """
    cards = f"{' '.join(view.hole)} / {' '.join(view.board) or '-'}"
    return f"{view.position}: {cards}, pot {view.pot}, {view.bounds.stack} behind: {view.bounds}"


def _cards(cards: Sequence[str]) -> str:
    return f"[{', '.join(cards)}]"
