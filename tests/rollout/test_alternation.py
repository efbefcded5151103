from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.rollout.alternation import Alternation, Turn
from echo2.types import Policy


def test_the_learner_has_the_weights_first_and_then_they_alternate() -> None:
    turns = Alternation()
    assert (turns.turn, turns.may_begin, turns.may_sample) == (Turn.TRAINING, False, False)
    assert not turns.ask(), "they are the learner's already"
    turns.settle(Policy(0, 0))
    assert (turns.may_begin, turns.may_sample) == (True, True)
    assert turns.ask()
    assert (turns.may_begin, turns.may_sample) == (False, True)
    turns.emptied()
    assert (turns.may_begin, turns.may_sample) == (False, False)
    turns.settle(Policy(0, 1))
    assert turns.policy == Policy(0, 1)


def test_weights_do_not_go_back_to_a_name_that_they_had() -> None:
    turns = Alternation()
    turns.settle(Policy(0, 3))
    turns.ask()
    turns.emptied()
    with pytest.raises(RuntimeError, match=r"must be newer than 0\.3"):
        turns.settle(Policy(0, 3))
    turns.settle(Policy(1, 2))
    assert turns.policy == Policy(1, 2)


@given(st.lists(st.sampled_from(["ask", "emptied", "settle"]), max_size=30))
def test_whatever_is_called_weights_change_only_while_nothing_samples(calls: list[str]) -> None:
    turns, version = Alternation(), 0
    for call in calls:
        before = turns.turn
        legal = {"ask": True, "emptied": before is Turn.ENDING, "settle": before is Turn.TRAINING}[call]
        act = {"ask": turns.ask, "emptied": turns.emptied, "settle": lambda v=version: turns.settle(Policy(0, v))}[call]
        if legal:
            act()
        else:
            with pytest.raises(RuntimeError):
                act()
            assert turns.turn is before
        version += call == "settle"
        assert not (turns.turn is Turn.TRAINING and turns.may_sample)
        assert turns.may_begin <= turns.may_sample
        assert turns.may_sample <= (turns.policy is not None)
