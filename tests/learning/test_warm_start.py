from __future__ import annotations

import math

import pytest
import torch
from trajectories import policy_of, tiny_qwen3

from echo2.errors import UserError
from echo2.learning.warm_start import GoldTalk, warm_start

TALKS: list[GoldTalk] = [[([1, 2], [3, 4, 5])], [([1, 2, 6], [7])]]


def start(steps: int, gold: list[GoldTalk] = TALKS) -> tuple[float, list[torch.Tensor]]:
    policy = policy_of(tiny_qwen3())
    loss = warm_start(policy, lambda _: gold, steps=steps, lr=1e-2, micro_batch_tokens=1000)
    return loss, [p.detach() for p in policy.parameters().values()]


def test_gold_replies_become_probable() -> None:
    assert start(40)[0] < 0.2 < 1.5 < start(1)[0]


def test_the_same_talks_give_the_same_weights() -> None:
    assert all(torch.equal(a, b) for a, b in zip(start(3)[1], start(3)[1], strict=True))


def test_the_loss_is_the_mean_over_gold_reply_tokens_however_they_are_split() -> None:
    def first_loss(budget: int) -> float:
        return warm_start(policy_of(tiny_qwen3()), lambda _: TALKS, steps=1, lr=1e-2, micro_batch_tokens=budget)

    assert first_loss(1) == pytest.approx(first_loss(1000), abs=1e-5)


def test_every_gold_reply_of_a_talk_is_learned_and_nothing_else() -> None:
    """Two turns in one row: the loss is the mean over the tokens of both replies, in their context."""
    policy = policy_of(tiny_qwen3())
    turns: GoldTalk = [([1, 2], [3, 4]), ([5, 6], [7])]
    loss = warm_start(policy, lambda _: [turns], steps=1, lr=1e-9, micro_batch_tokens=100)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    logp = policy.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    said = [float(logp[at - 1, tokens[at]].detach()) for at in (2, 3, 6)]
    assert loss == pytest.approx(-sum(said) / 3, abs=1e-4)


def test_each_step_asks_for_its_own_talks() -> None:
    asked = []

    def gold(step: int) -> list[GoldTalk]:
        asked.append(step)
        return TALKS

    warm_start(policy_of(tiny_qwen3()), gold, steps=3, lr=1e-2, micro_batch_tokens=100)
    assert asked == [0, 1, 2]


def test_no_steps_change_nothing() -> None:
    loss, weights = start(0)
    assert math.isnan(loss)
    assert all(torch.equal(a, b) for a, b in zip(weights, tiny_qwen3().parameters(), strict=True))


def test_talks_in_tokens_that_the_model_does_not_have_are_the_users_mistake() -> None:
    """As the bytes of the scripted engine are to a model with a small vocabulary."""
    policy = policy_of(tiny_qwen3())
    foreign = policy.vocabulary
    with pytest.raises(UserError, match=f"which has {foreign}, got token {foreign}"):
        warm_start(policy, lambda step: [[([1, 2], [foreign])]], steps=1, lr=1e-3, micro_batch_tokens=64)


def test_a_step_without_talks_is_an_error() -> None:
    with pytest.raises(ValueError, match="step 0 must have a gold reply"):
        start(1, [])
