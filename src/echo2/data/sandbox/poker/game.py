"""No-Limit Texas Hold'em for two to six seats, as a sandbox.

Invariant: the gains of all seats sum to zero whenever a hand is over, and the same seed deals the same cards to the
same seats whoever sits there, so that two players can be compared on duplicate deals.

The button is seat 0 in the first hand and moves to the next seat that has chips after each one; between the last two
the big blind moves on, so that nobody posts it twice when a third player leaves (TDA rule on heads-up play).
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.data.sandbox.poker.actions import read, settle
from echo2.data.sandbox.poker.bots import BOTS
from echo2.data.sandbox.poker.cards import chen, shuffled
from echo2.data.sandbox.poker.hand import Hand
from echo2.data.sandbox.poker.text import Opponent, View, brief_text, positions, rules_text, state_text
from echo2.data.sandbox.sandbox import Bot, Fault, Outcome, Turn
from echo2.errors import ConfigError

MAX_SEATS = 6
MAX_CHIPS = 10**9
_TIERS = ((10.0, "premium"), (8.0, "strong"), (6.0, "good"), (4.0, "fair"))
"""Least Chen points of each; below the last a hand is `weak`."""


class Poker:
    """seats: 2 to 6.  small_blind, big_blind, stack: whole chips; ``stack`` may also be a list, one for each seat.

    hands: hands of one game.  carry: stacks go on into the next hand, and a seat without chips is out; otherwise every
    hand begins with full stacks.  brief: rules and states of a line, for short contexts.
    """

    def __init__(
        self,
        *,
        seats: int = 2,
        small_blind: int = 1,
        big_blind: int = 2,
        stack: int | list[int] = 200,
        hands: int = 1,
        carry: bool = False,
        brief: bool = False,
    ) -> None:
        stacks = stack if isinstance(stack, list) else [stack] * min(seats if isinstance(seats, int) else 0, MAX_SEATS)
        faults = [
            f"poker: {name} must be an integer in {low}..{high}, got {value!r}"
            for name, value, low, high in (
                ("seats", seats, 2, MAX_SEATS),
                ("small_blind", small_blind, 1, MAX_CHIPS),
                ("big_blind", big_blind, 1, MAX_CHIPS),
                ("hands", hands, 1, MAX_CHIPS),
                *(("stack", chips, 1, MAX_CHIPS) for chips in stacks),
            )
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high
        ]
        if not faults and small_blind > big_blind:
            faults.append(f"poker: small_blind must be at most big_blind, got {small_blind} and {big_blind}")
        if not faults and min(stacks) <= big_blind:
            faults.append(f"poker: stack must be more than a big blind of {big_blind}, got {min(stacks)}")
        if not faults and len(stacks) != seats:
            faults.append(f"poker: stack must be a number or one for each of the {seats} seats, got {len(stacks)}")
        faults += [
            f"poker: {name} must be true or false, got {value!r}"
            for name, value in (("carry", carry), ("brief", brief))
            if not isinstance(value, bool)
        ]
        if faults:
            raise ConfigError(faults)
        self._stacks, self._blinds = tuple(stacks), (small_blind, big_blind)
        self._hands, self._carry, self._brief = hands, carry, brief
        self._seed = 0
        self._number = 0
        self._banks = list(stacks)
        """[seats] stacks at the beginning of the hand"""
        self._settled = [0] * seats
        """[seats] gains of finished hands"""
        self._order: list[int] = []
        """[places] seat of each place"""
        self._button = 0
        self._hand: Hand | None = None
        self._events: list[list[str]] = []
        """[seats] what each has not read yet"""
        self._raises = 0
        self._holes: dict[int, tuple[str, str]] = {}
        """Hole cards of the first hand, by seat."""

    @property
    def seats(self) -> int:
        return len(self._stacks)

    @property
    def rules(self) -> str:
        return rules_text(self.seats, self._blinds, self._brief)

    @property
    def currency(self) -> str:
        return "chips"

    @property
    def default_rule(self) -> str:
        return "you check or fold" if self._brief else "you check if that is free, and fold if it is not"

    @property
    def fault_cost(self) -> float:
        """A big blind: more than a fold before the flop ever costs."""
        return float(self._blinds[1])

    @property
    def measure(self) -> tuple[str, float]:
        return "bb_per_100", 100.0 / self._blinds[1] / self._hands

    @property
    def bots(self) -> dict[str, Bot]:
        return dict(BOTS)

    def deck(self, seed: int, number: int) -> list[str]:
        """Cards of hand ``number`` of a game; two for each place from the left of the button, then the board's five."""
        return shuffled(f"poker/{seed}/{number}")

    def reset(self, seed: int) -> Turn:
        self._seed, self._number, self._button = seed, 0, 0
        self._banks = list(self._stacks)
        self._settled = [0] * self.seats
        self._events = [[] for _ in self._stacks]
        turn = self._deal()
        self._holes = {seat: self._playing().holes[place] for place, seat in enumerate(self._order)}
        assert turn is not None, "stacks above the big blind leave somebody to ask"
        return turn

    def step(self, reply: str) -> Outcome | Fault:
        hand = self._playing()
        place, bounds = hand.actor, hand.bounds()
        assert place is not None
        said = read(reply)
        action = said if isinstance(said, Fault) else settle(said, bounds)
        if isinstance(action, Fault):
            return action
        street = hand.street
        hand.act(action)
        cost = bounds.to_call if action.kind == "call" else (action.amount or bounds.in_front) - bounds.in_front
        words = f"{action} {cost}" if action.kind == "call" else str(action)
        if cost == bounds.stack:
            words += ", all-in"
        self._raises = 0 if hand.street != street else self._raises + (action.kind in ("bet", "raise"))
        self._tell(f"{street.capitalize()}, {positions(len(self._order))[place]}: {words}.", but=self._order[place])
        turn = self._turn() if hand.actor is not None else self._after_hand()
        return Outcome(f"Action: {words}", turn)

    def gain(self, seat: int) -> float:
        running = 0
        if self._hand is not None and seat in self._order:
            place = self._order.index(seat)
            running = self._hand.stacks[place] - self._hand.starting[place]
        return float(self._settled[seat] + running)

    def likeness(self, seat: int) -> str:
        """Strength of the first hand's hole cards in five words, and whether the seat had the button."""
        points = chen(self._holes[seat])
        tier = next((word for least, word in _TIERS if points >= least), "weak")
        return f"{tier}/{'button' if seat == 0 else 'other'}"

    # ---- hands -------------------------------------------------------------------------------------------------

    def _playing(self) -> Hand:
        if self._hand is None:
            raise ValueError("a game must be reset before it is played, and again when it is over")
        return self._hand

    def _deal(self) -> Turn | None:
        """Begin hand ``_number``; whose turn it is, None where the blinds decided every hand that was left."""
        around = [(self._button + 1 + i) % self.seats for i in range(self.seats)]
        self._order = [seat for seat in around if self._banks[seat]]
        # The blinds and both stacks may leave nothing to decide: such a hand is over when it is dealt.
        self._hand = Hand(
            [self._banks[seat] for seat in self._order], self._blinds, self.deck(self._seed, self._number)
        )
        self._raises = 0
        return self._turn() if self._hand.actor is not None else self._after_hand()

    def _after_hand(self) -> Turn | None:
        """Settle a hand; deal the next one while there is one to play."""
        hand = self._playing()
        gains = [hand.stacks[place] - hand.starting[place] for place in range(len(self._order))]
        for place, seat in enumerate(self._order):
            self._settled[seat] += gains[place]
            if self._carry:
                self._banks[seat] += gains[place]
        names = positions(len(self._order))
        self._tell("Hand over: " + ", ".join(f"{n} {g:+d}" for n, g in zip(names, gains, strict=True)) + ".")
        self._hand = None
        self._number += 1
        alive = [seat for seat in range(self.seats) if self._banks[seat]]
        if self._number >= self._hands or len(alive) < 2:
            return None
        if len(alive) == 2:
            last_big_blind = self._order[0] if len(self._order) == 2 else self._order[1]
            alive.remove(self._next(last_big_blind, alive))
            self._button = alive[0]
        else:
            self._button = self._next(self._button, alive)
        return self._deal()

    def _next(self, seat: int, among: Sequence[int]) -> int:
        """The first of ``among`` to the left of a seat."""
        return next(s for i in range(1, self.seats + 1) if (s := (seat + i) % self.seats) in among)

    # ---- what seats read ---------------------------------------------------------------------------------------

    def _tell(self, event: str, but: int | None = None) -> None:
        for seat, unread in enumerate(self._events):
            if seat != but:
                unread.append(event)

    def _turn(self) -> Turn:
        hand = self._playing()
        place = hand.actor
        assert place is not None
        seat = self._order[place]
        names = positions(len(self._order))
        view = View(
            hole=hand.holes[place],
            board=tuple(hand.board),
            street=hand.street,
            position=names[place],
            pot=hand.pot,
            bounds=hand.bounds(),
            big_blind=self._blinds[1],
            opponents=tuple(self._opponents(hand, names, place)),
            raises=self._raises,
            events=tuple(self._events[seat]),
        )
        self._events[seat] = []
        default = "Action: fold" if view.bounds.to_call else "Action: check"
        replies = tuple(words if self._brief else f"Action: {words}" for words in view.bounds.examples)
        return Turn(seat, brief_text(view) if self._brief else state_text(view), view, default, replies)

    def _opponents(self, hand: Hand, names: Sequence[str], place: int) -> list[Opponent]:
        others = [(place + i) % len(self._order) for i in range(1, len(self._order))]
        return [Opponent(names[i], hand.stacks[i], hand.in_front[i], hand.live[i]) for i in others]
