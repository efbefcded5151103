"""One hand of No-Limit Texas Hold'em, its betting by ``pokerkit``, with cards that are known beforehand.

Invariant: chips are conserved: stacks and what lies in the middle sum to the starting stacks after every action.

Places count from the left of the button, which is last: the small blind is 0, the big blind 1; heads-up the button
posts the small blind, so place 1 is the button and small blind, place 0 the big blind.
"""

from __future__ import annotations

from collections.abc import Sequence

from pokerkit import Automation, NoLimitTexasHoldem

from echo2.data.sandbox.poker.actions import Action, Bounds
from echo2.data.sandbox.poker.pots import payments

STREETS = ("preflop", "flop", "turn", "river")
_FLOP, _CARDS_OF_BOARD = 3, 5
_UNSEEN = "??"
_AUTOMATIC = (
    Automation.ANTE_POSTING,
    Automation.BET_COLLECTION,
    Automation.BLIND_OR_STRADDLE_POSTING,
)
"""The library's hand stops where the betting ends; its showdown is not used (``pots``)."""


class Hand:
    """stacks: [places] at least one chip each.  deck: two cards for each place in order, then the five of the board."""

    def __init__(self, stacks: Sequence[int], blinds: tuple[int, int], deck: Sequence[str]) -> None:
        places = len(stacks)
        self.starting = tuple(stacks)
        self.holes = [(deck[2 * place], deck[2 * place + 1]) for place in range(places)]
        self._to_come = list(deck[2 * places : 2 * places + _CARDS_OF_BOARD])
        self.board: list[str] = []
        # An ante trimming status of True and no antes; the smallest bet is the big blind.
        self._state = NoLimitTexasHoldem.create_state(_AUTOMATIC, True, 0, blinds, blinds[1], self.starting, places)
        self._paid = [start - left for start, left in zip(self.starting, self._state.stacks, strict=True)]
        self._live = [True] * places
        self._final: tuple[int, ...] | None = None
        """[places] stacks of a finished hand"""
        for hole in self.holes:
            self._state.deal_hole("".join(hole))
        self._deal()

    @property
    def actor(self) -> int | None:
        """The place to act; None when the hand is over."""
        return self._state.actor_index if self._final is None else None

    @property
    def stacks(self) -> tuple[int, ...]:
        """[places] chips behind"""
        if self._final is not None:
            return self._final
        return tuple(start - paid for start, paid in zip(self.starting, self._paid, strict=True))

    @property
    def in_front(self) -> tuple[int, ...]:
        """[places] chips bet on this street"""
        return tuple(self._state.bets)

    @property
    def live(self) -> tuple[bool, ...]:
        """[places] not folded"""
        return tuple(self._live)

    @property
    def pot(self) -> int:
        """All chips in the middle, this street's bets among them; 0 when the hand is over."""
        return 0 if self._final is not None else sum(self._paid)

    @property
    def street(self) -> str:
        return STREETS[0 if not self.board else len(self.board) - 2]

    def bounds(self) -> Bounds:
        """Raises ValueError when nobody is to act."""
        place = self.actor
        if place is None:
            raise ValueError("a hand that is over has no legal actions")
        state = self._state
        return Bounds(
            to_call=int(state.checking_or_calling_amount or 0),
            facing=max(state.bets),
            in_front=state.bets[place],
            stack=state.stacks[place],
            min_to=state.min_completion_betting_or_raising_to_amount,
            max_to=state.max_completion_betting_or_raising_to_amount,
        )

    def act(self, action: Action) -> None:
        """Take a legal action (``actions.settle``). Raises ValueError for any other."""
        place = self.actor
        if place is None:
            raise ValueError("a hand that is over takes no action")
        if action.kind == "fold":
            self._state.fold()
            self._live[place] = False
        elif action.kind in ("check", "call"):
            self._paid[place] += int(self._state.checking_or_calling_amount or 0)
            self._state.check_or_call()
        else:
            assert action.amount is not None, "a legal bet or raise has a total"
            self._paid[place] += action.amount - self._state.bets[place]
            self._state.complete_bet_or_raise_to(action.amount)
        self._deal()

    def _deal(self) -> None:
        """Deal what is due; when nobody is left to act, the rest of the board if it decides, and pay."""
        state = self._state
        while state.can_burn_card() or state.can_deal_board():
            if state.can_burn_card():
                state.burn_card(_UNSEEN)
            else:
                state.deal_board("".join(self._turn_up(1 if self.board else _FLOP)))
        if state.actor_index is None:
            if sum(self._live) > 1:
                self._turn_up(len(self._to_come))
            back = payments(self._paid, self._live, self.holes, self.board)
            left = (start - paid for start, paid in zip(self.starting, self._paid, strict=True))
            self._final = tuple(stack + got for stack, got in zip(left, back, strict=True))

    def _turn_up(self, count: int) -> list[str]:
        cards, self._to_come = self._to_come[:count], self._to_come[count:]
        self.board += cards
        return cards
