from __future__ import annotations

import pytest
import torch

from echo2.rollout.engines.sampling import draw, uniforms


def column(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


@pytest.mark.parametrize(("token", "expected"), [(0, -0.01815), (1, -4.0181)])
def test_logprobs_are_taken_at_the_temperature(token: int, expected: float) -> None:
    """C06: the report's own numbers."""
    uniform = column(0.5 if token == 0 else 0.999, dtype=torch.float64)
    tokens, logprobs = draw(torch.tensor([[2.0, 0.0]]), column(0.5), column(1.0), uniform)
    assert tokens.tolist() == [token]
    assert logprobs.item() == pytest.approx(expected, abs=1e-4)


def test_draws_follow_the_distribution() -> None:
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    count = 4_000
    uniform = uniforms(0, 0, count)[:, None]
    logits = weights.log().expand(count, -1)
    tokens, _ = draw(logits, torch.ones(count, 1), torch.ones(count, 1), uniform)
    shares = torch.bincount(tokens, minlength=4) / count
    assert shares[1] == 0
    torch.testing.assert_close(shares, weights, atol=0.03, rtol=0)


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    uniform = column(0.0, 1.0 - 2.0**-53, dtype=torch.float64)
    tokens, _ = draw(logits, torch.ones(2, 1), torch.ones(2, 1), uniform)
    assert tokens.tolist() == [1, 2]


def test_streams_of_rows_and_seeds_are_apart_and_repeatable() -> None:
    assert torch.equal(uniforms(1, 2, 8), uniforms(1, 2, 8))
    assert torch.equal(uniforms(1, 2, 8)[:4], uniforms(1, 2, 4))
    streams = {tuple(uniforms(seed, row, 4).tolist()) for seed in range(4) for row in range(4)}
    assert len(streams) == 16
