from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from echo2.learning.objectives import ObjectiveSettings, TokenTerms
from echo2.learning.objectives.grpo import grpo
from echo2.learning.objectives.grpo_paper import grpo_paper

SETTINGS = ObjectiveSettings(clip_low=0.2, clip_high=0.2, truncation=2.0)


def terms(**given: Any) -> TokenTerms:
    """One token per entry; what is not given is neutral."""
    size = max(len(value) for value in given.values() if value is not None)
    filled: dict[str, Any] = {
        "logp": [-1.0] * size,
        "logp_prox": [-1.0] * size,
        "logp_behaviour": [-1.0] * size,
        "known": [True] * size,
        "current": [True] * size,
        "logp_ref": None,
        "advantages": [1.0] * size,
        "mask": [True] * size,
        "nucleus": [False] * size,
        "lengths": [1] * size,
        "group": [0] * size,
    } | given
    made = {name: None if value is None else torch.tensor(value) for name, value in filled.items()}
    made["logp"].requires_grad_()
    return TokenTerms(**made, groups=1)


def gradient(given: TokenTerms, objective: Any = grpo, settings: ObjectiveSettings = SETTINGS) -> list[float]:
    objective(given, settings).loss.backward()
    assert given.logp.grad is not None
    return [float(value) for value in given.logp.grad]


def test_unchanged_weights_give_ratio_one_and_the_policy_gradient() -> None:
    given = terms(advantages=[1.0, -0.5])
    sums = grpo(given, SETTINGS)
    assert float(sums.ratio) == 2.0
    assert float(sums.clipped) == 0.0
    assert gradient(terms(advantages=[1.0, -0.5])) == pytest.approx([-1.0, 0.5])


def test_clipping_takes_the_gradient_only_where_the_step_already_went_far_enough() -> None:
    up, down = math.log(1.5), math.log(0.5)
    given = {"logp": [up, up, down, down], "logp_prox": [0.0] * 4, "logp_behaviour": [0.0] * 4}
    advantages = [1.0, -1.0, 1.0, -1.0]
    assert gradient(terms(advantages=advantages, **given)) == pytest.approx([0.0, 1.5, -0.5, 0.0])
    assert float(grpo(terms(advantages=advantages, **given), SETTINGS).clipped) == 2.0


def test_the_weight_is_truncated_and_carries_no_gradient() -> None:
    given = {"logp_behaviour": [-3.0, -1.5, -0.5], "advantages": [1.0, 1.0, 1.0]}
    expected = [2.0, math.exp(0.5), math.exp(-0.5)]
    assert gradient(terms(**given)) == pytest.approx([-w for w in expected])
    assert float(grpo(terms(**given), SETTINGS).weight) == pytest.approx(sum(expected))


@pytest.mark.parametrize("objective", [grpo, grpo_paper])
def test_a_token_without_a_log_prob_of_the_engine_has_weight_one(objective: Any) -> None:
    given = terms(logp_behaviour=[-50.0], known=[False], current=[False])
    sums = objective(given, SETTINGS)
    assert float(sums.weight) == 1.0
    assert float(sums.ratio) == 1.0


def test_the_kl_term_is_weighted_like_the_rest_and_holds_where_the_advantage_is_zero() -> None:
    settings = ObjectiveSettings(kl_beta=0.5, kl_estimator="k2")
    given = terms(logp_ref=[-3.0], logp_behaviour=[-1.0 - math.log(1.5)], advantages=[0.0])
    sums = grpo(given, settings)
    assert float(sums.kl) == pytest.approx(2.0)
    assert float(sums.loss.detach()) == pytest.approx(1.5 * 0.5 * 2.0)


def test_the_papers_form_clips_stale_tokens_against_the_sampling_version() -> None:
    stale = terms(logp_behaviour=[-1.0 - math.log(1.5)], current=[False])
    sums = grpo_paper(stale, SETTINGS)
    assert float(sums.ratio) == pytest.approx(1.5)
    assert float(sums.clipped) == 1.0
    assert float(sums.weight) == 1.0


def test_the_papers_form_corrects_the_samplers_numerics_for_current_tokens() -> None:
    current = terms(logp_behaviour=[-1.0 - math.log(1.5)], current=[True])
    sums = grpo_paper(current, SETTINGS)
    assert float(sums.ratio) == 1.0
    assert float(sums.weight) == pytest.approx(1.5)


@pytest.mark.parametrize("objective", [grpo, grpo_paper])
def test_masked_tokens_contribute_nothing(objective: Any) -> None:
    given = terms(mask=[True, False], logp_behaviour=[-1.0, -40.0], advantages=[1.0, 1e30], logp=[-1.0, -9.0])
    assert gradient(given, objective) == pytest.approx([-1.0, 0.0])
    assert float(objective(given, SETTINGS).ratio) == 1.0
