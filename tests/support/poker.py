"""Stacked decks, and hands of random play that must keep the rules."""

from __future__ import annotations

from random import Random

from echo2.data.sandbox.poker.actions import Action, Bounds, read, settle
from echo2.data.sandbox.poker.cards import DECK, shuffled
from echo2.data.sandbox.poker.hand import Hand

ROYAL_BOARD = "AsKsQsJsTs"
"""Everybody ties."""


def cards(text: str) -> list[str]:
    return [text[i : i + 2] for i in range(0, len(text), 2)]


def deck(*holes: str, board: str) -> list[str]:
    """Hole cards by place from the left of the button; empty ones are filled with cards nobody wants."""
    wanted = [card for hole in holes for card in cards(hole)] + cards(board)
    spare = iter([card for card in DECK if card not in wanted])
    dealt = [card for hole in holes for card in (cards(hole) or [next(spare), next(spare)])]
    return dealt + cards(board)


def say(hand: Hand, text: str) -> None:
    """Take an action that must be legal."""
    action = settle(read(text), hand.bounds())  # type: ignore[arg-type]
    assert isinstance(action, Action), action
    hand.act(action)


def random_action(bounds: Bounds, draw: Random) -> Action:
    """Any legal action; small raises and all-ins are likelier than they are at a table."""
    kinds = ["call", "call", "fold"] if bounds.to_call else ["check", "check"]
    if bounds.min_to is not None:
        kinds += ["least", "some", "all-in"]
    kind = draw.choice(kinds)
    if kind in ("fold", "check", "call"):
        return Action(kind)  # type: ignore[arg-type]
    assert bounds.min_to is not None and bounds.max_to is not None
    amount = {"least": bounds.min_to, "all-in": bounds.max_to}.get(kind) or draw.randint(bounds.min_to, bounds.max_to)
    return Action("raise" if bounds.facing else "bet", amount)


def showdown_by_pokerkit(hand: Hand) -> list[int]:
    """[places] stacks when the library shows the hands, folds the beaten ones and pays the others itself."""
    state = hand._state
    board = iter(hand.board[len(state.board_cards) :])
    while state.status:
        if state.can_show_or_muck_hole_cards():
            state.show_or_muck_hole_cards()
        elif state.can_burn_card():
            state.burn_card("??")
        elif state.can_deal_board():
            state.deal_board("".join(next(board) for _ in range(1 if state.board_cards else 3)))
        elif state.can_kill_hand():
            state.kill_hand()
        elif state.can_push_chips():
            state.push_chips()
        else:
            state.pull_chips()
    return list(state.stacks)


def play_random_hand(number: int, compared: int = 1) -> None:
    """One hand of random seats, stacks, cards and actions; asserts what must hold after every action.

    Who won how much is held against ``pokerkit`` for one hand in ``compared``. It evaluates hands itself, and agrees
    but for odd chips, of which it splits those of joined pots together.
    """
    draw = Random(f"hand/{number}")
    places = draw.randint(2, 6)
    stacks = [draw.randint(3, 60) for _ in range(places)]
    total = sum(stacks)
    hand = Hand(stacks, (1, 2), shuffled(f"deck/{number}"))
    for _ in range(500):
        place = hand.actor
        if place is None:
            break
        assert sum(hand.stacks) + hand.pot == total
        bounds = hand.bounds()
        action = random_action(bounds, draw)
        legal = settle(action, bounds)
        assert isinstance(legal, Action), (legal, bounds)
        hand.act(legal)
    assert hand.actor is None
    assert sum(hand.stacks) == total
    if number % compared:
        return
    library = showdown_by_pokerkit(hand)
    apart = [abs(ours - theirs) for ours, theirs in zip(hand.stacks, library, strict=True)]
    assert max(apart) <= (len(set(stacks)) if sum(hand.live) > 2 else 0), (number, hand.stacks, library)
