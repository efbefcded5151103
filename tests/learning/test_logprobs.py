from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echo2.learning import logprobs
from echo2.learning.logprobs import sampled_logprobs


def logits_as_states(logits: list[float]) -> tuple[Tensor, Tensor]:
    """Hidden states and an output embedding whose product is the given logits."""
    return torch.tensor([logits]), torch.eye(len(logits))


@pytest.mark.parametrize(("chosen", "expected"), [(0, -0.01815), (1, -4.0181)])
def test_c06_the_temperature_divides_logits_before_the_softmax(chosen: int, expected: float) -> None:
    hidden, weight = logits_as_states([2.0, 0.0])
    found, _ = sampled_logprobs(hidden, weight, None, torch.tensor([chosen]), torch.tensor([0.5]), chunk=8)
    assert float(found) == pytest.approx(expected, abs=1e-4)


def problem(tokens: int = 11, width: int = 6, vocabulary: int = 13) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(tokens, width, generator=random).requires_grad_(),
        "weight": torch.randn(vocabulary, width, generator=random).requires_grad_(),
        "bias": torch.randn(vocabulary, generator=random).requires_grad_(),
        "targets": torch.randint(0, vocabulary, (tokens,), generator=random),
        "temperature": torch.rand(tokens, generator=random) + 0.5,
    }


def directly(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    scaled = (p["hidden"] @ p["weight"].T + p["bias"]) / p["temperature"][:, None]
    distribution = torch.distributions.Categorical(logits=scaled)
    return distribution.log_prob(p["targets"]), distribution.entropy()


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_values_and_gradients_are_those_of_the_whole_softmax_whatever_the_chunk(chunk: int) -> None:
    ours, theirs = problem(), problem()
    slope = torch.linspace(-1, 2, 11)
    logp, entropy = sampled_logprobs(**ours, chunk=chunk)
    expected, expected_entropy = directly(theirs)
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    (logp * slope).sum().backward()
    (expected * slope).sum().backward()
    for name in ("hidden", "weight", "bias"):
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


def test_logits_of_more_than_a_chunk_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = logprobs._scaled_logits

    def watched(hidden: Tensor, *rest: Tensor | None) -> Tensor:
        sizes.append(len(hidden))
        return real(hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(logprobs, "_scaled_logits", watched)
    logp, _ = sampled_logprobs(**problem(), chunk=4)
    logp.sum().backward()
    assert sizes == [4, 4, 3] * 2


def test_half_precision_states_give_float32_log_probs_and_gradients_of_their_own_type() -> None:
    given = problem()
    hidden = given["hidden"].detach().bfloat16().requires_grad_()
    logp, _ = sampled_logprobs(**(given | {"hidden": hidden}), chunk=4)
    logp.sum().backward()
    assert logp.dtype is torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype is torch.bfloat16


def test_no_targets_give_no_log_probs_and_a_zero_gradient() -> None:
    given = problem(tokens=0)
    logp, entropy = sampled_logprobs(**given, chunk=4)
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,)


def test_huge_logits_stay_finite() -> None:
    hidden, weight = logits_as_states([1e30, -1e30, 0.0])
    logp, entropy = sampled_logprobs(hidden, weight, None, torch.tensor([1]), torch.tensor([1.0]), chunk=2)
    assert torch.isfinite(logp).all()
    assert torch.isfinite(entropy).all()
