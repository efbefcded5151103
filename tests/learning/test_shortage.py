"""Memory that runs out in a pass: what is trained is what would have been trained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from short_memory import short_of_memory
from torch import Tensor
from trajectories import policy_of, some_batch, tiny_qwen3

from echo2.config.sections import LearningSection
from echo2.errors import UserError
from echo2.learning.batch import BatchRules, form_training_batch
from echo2.learning.objectives import OBJECTIVES, ObjectiveSettings
from echo2.learning.optimizer import build_optimizer
from echo2.learning.policy_model import PolicyModel
from echo2.learning.shortage import Budget, Short
from echo2.learning.update import UpdateSettings, run_updates
from echo2.learning.warm_start import warm_start

Starve = Callable[[PolicyModel], None]


def stepped(
    starve: Starve | None = None, *, steps: int = 2, objective: str = "grpo", kl_beta: float = 0.0
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights and statistics after training steps of two updates each. starve: has the policy run out of memory."""
    policy = policy_of(tiny_qwen3().double())
    reference = policy_of(tiny_qwen3().double()) if kl_beta else None
    optimizer = build_optimizer(policy.parameters(), LearningSection(lr=1e-2))
    given = UpdateSettings(OBJECTIVES[objective], ObjectiveSettings(kl_beta=kl_beta), 2, 1000, 1.0)
    budget = Budget(given.micro_batch_tokens)
    if starve:
        starve(policy)
        if reference is not None:
            starve(reference)
    found = []
    for step in range(steps):
        batch = form_training_batch(some_batch(step, groups=6, version=0), BatchRules())
        found.append(run_updates(batch, policy, reference, optimizer, given, budget=budget))
    return {name: value.detach().clone() for name, value in policy.parameters().items()}, found


NUMBERS = ("loss", "grad_norm", "entropy", "kl", "ratio_mean", "weight_mean", "trainable_tokens", "sampler_ratio")


@pytest.mark.parametrize("objective", ["grpo", "m2po", "gepo"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_step_that_runs_short_trains_what_it_would_have_trained(when: str, objective: str) -> None:
    """Gradients that were half made when it happened are not counted twice, and π_prox stays that of the beginning."""
    plenty, told = stepped(objective=objective, kl_beta=0.1)
    scarce, retold = stepped(lambda policy: short_of_memory(policy, 20, when), objective=objective, kl_beta=0.1)
    for name, value in plenty.items():
        torch.testing.assert_close(scarce[name], value, rtol=1e-9, atol=1e-12)
    for one, other in zip(told, retold, strict=True):
        for name in NUMBERS:
            assert one.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-6, abs=1e-9), name
    assert [one["memory_splits"] for one in told] == [0, 0]
    assert retold[0]["memory_splits"] >= 1


def test_the_size_that_fits_is_kept_for_the_steps_that_follow(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, told = stepped(lambda policy: short_of_memory(policy, 20, "forward"), steps=3)
    assert [one["memory_splits"] > 0 for one in told] == [True, False, False]
    assert told[2]["micro_batch_tokens"] == told[0]["micro_batch_tokens"] <= 20
    assert "set learning.micro_batch_tokens to that" in caplog.text


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_trajectory_that_does_not_fit_alone_is_a_sentence(when: str) -> None:
    with pytest.raises(UserError, match=r"fit into the learner's memory alone.*lower rollout\.max_new_tokens"):
        stepped(lambda policy: short_of_memory(policy, 3, when))


def test_a_warm_start_goes_on_in_smaller_micro_batches() -> None:
    talks: list[Any] = [[([1, 2], [3 + i, 4, 5])] for i in range(6)]
    weights = []
    for limit in (1000, 12):
        policy = policy_of(tiny_qwen3().double())
        short_of_memory(policy, limit, "backward")
        loss = warm_start(policy, lambda _: talks, steps=2, lr=1e-2, micro_batch_tokens=100)
        weights.append({"loss": torch.tensor(loss), **{k: v.detach() for k, v in policy.parameters().items()}})
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-7, atol=1e-10)


def test_the_budget_halves_what_did_not_fit_on_whatever_rank() -> None:
    budget = Budget(16384)
    budget.lower([Short(900, 3), Short(4000, 8)])
    assert (budget.tokens, budget.splits) == (2000, 1)
    with pytest.raises(UserError, match="one of 700 tokens"):
        budget.lower([Short(900, 3), Short(700, 1)])
