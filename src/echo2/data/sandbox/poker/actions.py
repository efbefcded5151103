"""Betting actions: read from text, and held against the rules.

Invariant: amounts are totals. ``raise to 20`` (and ``raise 20``) by a player with 4 in front costs 16. An action is
taken as said or not at all: a bet facing a bet, a raise below the minimum or above the stack, a check facing a bet
are illegal. The one exception is what every card room does: a call for more than the stack is a call with the whole
stack.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from echo2.data.sandbox.replies import action_text
from echo2.data.sandbox.sandbox import Fault

Kind = Literal["fold", "check", "call", "bet", "raise", "all-in"]

_AMOUNT = r"\$?(\d{1,3}(?:,\d{3})+|\d{1,9})(?: chips)?"
_GRAMMAR: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("fold", re.compile(r"(?:i )?folds?")),
    ("check", re.compile(r"(?:i )?checks?")),
    ("call", re.compile(rf"(?:i )?calls?(?: {_AMOUNT})?")),
    ("bet", re.compile(rf"(?:i )?bets? {_AMOUNT}")),
    ("raise", re.compile(rf"(?:i )?raises?(?: to)? {_AMOUNT}")),
    ("all-in", re.compile(r"(?:i (?:am |go )?)?all[- ]?in")),
)

UNCLEAR = "Your reply must hold exactly one line of the form 'Action: call'."


class Action(msgspec.Struct, frozen=True):
    kind: Kind
    amount: int | None = None
    """Total in front of the player on this street afterwards."""

    def __str__(self) -> str:
        if self.kind == "bet":
            return f"bet {self.amount}"
        return f"raise to {self.amount}" if self.kind == "raise" else self.kind


class Bounds(msgspec.Struct, frozen=True):
    """What the rules allow the player to act."""

    to_call: int
    """Chips a call costs, at most the stack."""
    facing: int
    """Largest amount in front of anybody on this street."""
    in_front: int
    stack: int
    """Chips behind."""
    min_to: int | None
    """Least total of a bet or raise; None where none is allowed."""
    max_to: int | None

    def __str__(self) -> str:
        words = ["fold", f"call {self.to_call}"] if self.to_call else ["check"]
        if self.min_to is not None:
            verb = "raise to" if self.facing else "bet"
            same = self.min_to == self.max_to
            words.append(f"{verb} {self.min_to}" if same else f"{verb} {self.min_to} to {self.max_to}")
        if self.min_to is not None or self.stack <= self.to_call:
            words.append("all-in")
        return ", ".join(words)

    @property
    def examples(self) -> list[str]:
        """One legal action of every kind; of bets and raises the least."""
        words = ["fold", "call"] if self.to_call else ["check"]
        if self.min_to is not None:
            words.append(f"{'raise to' if self.facing else 'bet'} {self.min_to}")
        if self.min_to is not None or self.stack <= self.to_call:
            words.append("all-in")
        return words


def read(reply: str) -> Action | Fault:
    """The action a reply names, whatever the state of the game."""
    words = action_text(reply)
    if words is None:
        return Fault("unclear", UNCLEAR)
    for kind, pattern in _GRAMMAR:
        found = pattern.fullmatch(words)
        if found:
            amount = found[1] if pattern.groups else None
            return Action(kind, None if amount is None else int(amount.replace(",", "")))
    if re.fullmatch(r"(?:i )?(?:bet|raise)s?(?: to)?", words):
        return Fault("unclear", "A bet or raise must name its total, as in 'Action: raise to 20'.")
    return Fault("unclear", UNCLEAR)


def settle(action: Action, bounds: Bounds) -> Action | Fault:
    """The action as the rules take it: fold, check, call, or bet or raise with its total."""
    match action.kind:
        case "fold":
            return action if bounds.to_call else Fault("illegal", "There is nothing to call: check instead of folding.")
        case "check":
            return action if not bounds.to_call else Fault("illegal", f"You must call {bounds.to_call}, raise or fold.")
        case "call":
            return _call(action, bounds)
        case "all-in":
            if bounds.stack <= bounds.to_call:
                return Action("call")
            return _wager(bounds.stack + bounds.in_front, bounds)
        case "bet" if bounds.facing:
            return Fault("illegal", f"There is a bet of {bounds.facing} already: say 'raise to' and the total.")
        case _:
            assert action.amount is not None
            return _wager(action.amount, bounds)


def _call(action: Action, bounds: Bounds) -> Action | Fault:
    if not bounds.to_call:
        return Fault("illegal", "There is nothing to call: check or bet.")
    if action.amount not in (None, bounds.to_call, bounds.facing):
        return Fault("illegal", f"A call costs {bounds.to_call}, got {action.amount}.")
    return Action("call")


def _wager(total: int, bounds: Bounds) -> Action | Fault:
    if bounds.min_to is None or bounds.max_to is None:
        return Fault("illegal", f"You may not raise now, only {bounds}.")
    if not bounds.min_to <= total <= bounds.max_to:
        verb = "raise to" if bounds.facing else "bet"
        return Fault("illegal", f"You may {verb} {bounds.min_to} to {bounds.max_to}, got {total}.")
    return Action("raise" if bounds.facing else "bet", total)
