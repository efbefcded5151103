from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from trajectories import batch_of, policy_of, some_batch, tiny_qwen3, trajectory

from echo2.config.sections import LearningSection
from echo2.learning import update
from echo2.learning.batch import BatchRules, form_training_batch
from echo2.learning.objectives import OBJECTIVES, Objective, ObjectiveSettings, ObjectiveSums, TokenTerms
from echo2.learning.objectives.grpo import grpo
from echo2.learning.optimizer import build_optimizer
from echo2.learning.policy_model import PolicyModel
from echo2.learning.update import UpdateSettings, run_updates
from echo2.transport.messages import BatchReply


def settings(**given: Any) -> UpdateSettings:
    filled = {
        "objective": Objective(grpo),
        "objective_settings": ObjectiveSettings(),
        "updates": 1,
        "micro_batch_tokens": 1000,
        "grad_clip": 0.0,
    } | given
    return UpdateSettings(**filled)


def train(
    reply: BatchReply, *, lr: float = 1e-2, reference: PolicyModel | None = None, **given: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights and statistics after one step from the same beginning."""
    policy = policy_of(tiny_qwen3())
    optimizer = build_optimizer(policy.parameters(), LearningSection(lr=lr, weight_decay=0.1))
    batch = form_training_batch(reply, BatchRules())
    statistics = run_updates(batch, policy, reference, optimizer, settings(**given))
    return {name: value.detach().clone() for name, value in policy.parameters().items()}, statistics


def gradients(reply: BatchReply, monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(policy: PolicyModel, _: float) -> None:
        found.update({n: p.grad.clone() for n, p in policy.parameters().items() if p.grad is not None})

    monkeypatch.setattr(update, "_clip", keep)
    train(reply, **given)
    return found


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("budget", [1, 12, 25])
def test_c04_the_gradient_is_the_same_however_the_update_is_split(
    budget: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"objective": OBJECTIVES[name], "objective_settings": ObjectiveSettings(longest_reply=4)}
    whole = gradients(some_batch(step=1, version=0), monkeypatch, micro_batch_tokens=1000, **given)
    split = gradients(some_batch(step=1, version=0), monkeypatch, micro_batch_tokens=budget, **given)
    assert whole
    assert any(bool(value.any()) for value in whole.values())
    for name, value in whole.items():
        torch.testing.assert_close(split[name], value, rtol=1e-4, atol=1e-6)


def test_c04_the_loss_is_the_mean_over_all_loss_bearing_tokens() -> None:
    def ones_for_short_rows(terms: TokenTerms, _: ObjectiveSettings) -> ObjectiveSums:
        zero = torch.zeros(())
        return ObjectiveSums((terms.logp * 0 + (terms.advantages > 0).float()).sum(), zero, zero, zero, zero)

    # 10 tokens of loss 1 and 990 of loss 0: a mean of two means would be 0.5
    reply = batch_of({0: [trajectory([1], [2] * 10, 1.0), *[trajectory([1], [3] * 45, 0.0)] * 22]})
    for budget in (1, 400, 5000):
        _, statistics = train(reply, objective=Objective(ones_for_short_rows), micro_batch_tokens=budget)
        assert statistics["loss"] == pytest.approx(0.01)


def test_c04_means_over_rows_and_over_a_constant_have_their_documented_values() -> None:
    """Losses of 1 per token: rows of 10 and 1 tokens. Sum 11; over 2 rows 5.5, over 2 rows of 20 tokens 0.275."""

    def ones(terms: TokenTerms, _: ObjectiveSettings) -> ObjectiveSums:
        zero = torch.zeros(())
        return ObjectiveSums((terms.logp * 0 + 1).sum(), zero, zero, zero, zero)

    reply = batch_of({0: [trajectory([1], [2] * 10, 1.0), trajectory([1], [3], 0.0)]})
    for budget in (1, 400):
        given = {"objective_settings": ObjectiveSettings(longest_reply=20), "micro_batch_tokens": budget}
        for mean, loss in (("tokens", 1.0), ("rows", 5.5), ("constant", 0.275)):
            _, statistics = train(reply, objective=Objective(ones, mean=mean), **given)  # type: ignore[arg-type]
            assert statistics["loss"] == pytest.approx(loss)


def test_what_an_objective_must_know_of_the_whole_update_is_summed_before_any_gradient() -> None:
    """Of each update its own tokens, at the log-probs of the step's beginning."""
    seen: list[tuple[float, ...]] = []

    def counted(terms: TokenTerms, _: ObjectiveSettings) -> Tensor:
        assert torch.equal(terms.logp, terms.logp_prox)
        return torch.tensor([terms.logp.numel(), terms.lengths.numel()], dtype=torch.float64)

    def sums(terms: TokenTerms, given: ObjectiveSettings) -> ObjectiveSums:
        assert terms.whole is not None
        seen.append(tuple(terms.whole.tolist()))
        return grpo(terms, given)

    _, statistics = train(
        some_batch(), updates=2, micro_batch_tokens=12, objective=Objective(sums, statistics=counted), lr=0.1
    )
    assert set(seen) == {(18.0, 6.0)}
    assert len(seen) > 2
    assert statistics["ratio_first"] == pytest.approx(1.0, abs=1e-6)


def test_c05_an_update_without_loss_bearing_tokens_leaves_everything_bit_for_bit() -> None:
    reply = batch_of({0: [trajectory([1, 2], []), trajectory([1, 2], [])]})
    before = {name: value.detach() for name, value in policy_of(tiny_qwen3()).parameters().items()}
    after, statistics = train(reply, updates=2)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert (statistics["updates"], statistics["updates_empty"], statistics["trainable_tokens"]) == (0, 2, 0)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_c05_rows_without_loss_do_not_change_the_others_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = (1.0, 0.0)
    some = [trajectory([1, 2], [3 + i, 4], r) for i, r in enumerate(rewards)]
    silent = [trajectory([1, 2], [], 1.0)] * 2
    alone = gradients(batch_of({0: some}), monkeypatch, micro_batch_tokens=4, objective=OBJECTIVES[name])
    beside = gradients(batch_of({0: some, 1: silent}), monkeypatch, micro_batch_tokens=4, objective=OBJECTIVES[name])
    assert all(torch.equal(beside[name], value) for name, value in alone.items())


def test_the_first_ratio_is_one_and_the_second_update_meets_a_changed_policy() -> None:
    _, statistics = train(some_batch(), updates=2)
    assert statistics["ratio_first"] == pytest.approx(1.0, abs=1e-6)
    assert statistics["ratio_mean"] != pytest.approx(1.0, abs=1e-6)
    assert statistics["updates"] == 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_c06_log_probs_of_the_engine_at_its_temperature_match_the_learners(temperature: float) -> None:
    model = tiny_qwen3()
    prompt, reply = [1, 2, 3], [4, 5, 6, 7]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + reply])).logits[0, 2:-1] / temperature
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(reply)[:, None]).flatten().tolist()
    records = [trajectory(prompt, reply, r, logprobs=logprobs, temperature=temperature) for r in (0.0, 1.0)]
    _, statistics = train(batch_of({0: records}))
    assert statistics["sampler_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert statistics["weight_mean"] == pytest.approx(1.0, abs=1e-3)


def test_the_proximal_policy_is_the_one_at_the_start_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TokenTerms] = []

    def watch(terms: TokenTerms, given: ObjectiveSettings) -> ObjectiveSums:
        seen.append(terms)
        return grpo(terms, given)

    train(some_batch(), updates=2, objective=Objective(watch), lr=0.1)
    still = []
    monkeypatch.setattr(update, "_clip", lambda *_: None)

    def watch_still(terms: TokenTerms, given: ObjectiveSettings) -> ObjectiveSums:
        still.append(terms)
        return grpo(terms, given)

    train(some_batch(), updates=2, objective=Objective(watch_still), lr=0.1)
    for moved, kept in zip(seen, still, strict=True):
        assert torch.equal(moved.logp_prox, kept.logp_prox)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_poisons_nothing(
    poison: float,
) -> None:
    calls = 0

    def first_is_poisoned(terms: TokenTerms, given: ObjectiveSettings) -> ObjectiveSums:
        nonlocal calls
        calls += 1
        sums = grpo(terms, given)
        if calls == 1:
            return ObjectiveSums(sums.loss * poison, sums.ratio, sums.clipped, sums.weight, sums.kl)
        return sums

    weights, statistics = train(some_batch(), updates=2, objective=Objective(first_is_poisoned))
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert all(math.isfinite(value) for value in statistics.values())
    assert (statistics["updates"], statistics["updates_not_finite"]) == (1, 1)


def test_the_kl_to_the_reference_is_zero_at_first_and_grows() -> None:
    policy, reference = policy_of(tiny_qwen3()), policy_of(tiny_qwen3())
    optimizer = build_optimizer(policy.parameters(), LearningSection(lr=1e-2))
    given = settings(objective_settings=ObjectiveSettings(kl_beta=0.1))
    batch = form_training_batch(some_batch(), BatchRules())
    kl = [run_updates(batch, policy, reference, optimizer, given)["kl"] for _ in range(3)]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-5
    assert all(
        torch.equal(a, b) for a, b in zip(reference.parameters().values(), tiny_qwen3().parameters(), strict=True)
    )


def test_clipping_bounds_the_gradient_but_reports_the_norm_before() -> None:
    _, free = train(some_batch())
    _, clipped = train(some_batch(), grad_clip=1e-3)
    assert clipped["grad_norm"] == pytest.approx(free["grad_norm"])
    assert free["grad_norm"] > 1e-3


def test_rewarded_replies_become_more_probable() -> None:
    policy = policy_of(tiny_qwen3())
    optimizer = build_optimizer(policy.parameters(), LearningSection(lr=1e-2))
    good, bad = [4, 5], [6, 7]
    records = [trajectory([1, 2], good, 1.0), trajectory([1, 2], bad, 0.0)]

    def logp(reply: list[int]) -> float:
        with torch.no_grad():
            logits = policy.model(torch.tensor([[1, 2, *reply]])).logits[0, 1:-1].log_softmax(-1)
        return float(logits.gather(1, torch.tensor(reply)[:, None]).sum())

    before = logp(good) - logp(bad)
    for step in range(5):
        run_updates(
            form_training_batch(batch_of({0: records}, step), BatchRules()), policy, None, optimizer, settings()
        )
    assert logp(good) - logp(bad) > before + 1.0


def test_speed_and_utilisation_are_of_the_work_that_was_done() -> None:
    _, statistics = train(some_batch(), updates=2)
    took_s = sum(value for name, value in statistics.items() if name.endswith("_s") and name != "tokens_per_s")
    assert statistics["tokens_per_s"] == pytest.approx(statistics["trainable_tokens"] / took_s)
    assert 0 < statistics["mfu"] < 1
