from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.learning.kl import Estimator, kl_per_token

ESTIMATORS: list[Estimator] = ["k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("logp", "ref", "k1", "k2", "k3"), [(-1.0, -3.0, 2.0, 2.0, 1.1353), (-3.0, -1.0, -2.0, 2.0, 4.3891)]
)
def test_c08_estimators_have_their_reference_values(logp: float, ref: float, k1: float, k2: float, k3: float) -> None:
    for estimator, value in zip(ESTIMATORS, (k1, k2, k3), strict=True):
        assert float(kl_per_token(torch.tensor(logp), torch.tensor(ref), estimator)) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_c08_an_improbable_token_has_finite_value_and_gradient(estimator: Estimator, dtype: torch.dtype) -> None:
    logp = torch.tensor([-100.0], dtype=dtype, requires_grad=True)
    value = kl_per_token(logp, torch.tensor([-1.0], dtype=dtype), estimator)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()
    assert float(logp.grad) != 0.0 or estimator == "k1"


@settings(max_examples=80, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-1e4, 0), st.sampled_from(ESTIMATORS))
def test_every_finite_input_has_finite_value_and_gradient(logp: float, ref: float, estimator: Estimator) -> None:
    variable = torch.tensor([logp], requires_grad=True)
    value = kl_per_token(variable, torch.tensor([ref], dtype=torch.float32), estimator)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert variable.grad is not None
    assert torch.isfinite(variable.grad).all()


@settings(max_examples=40, deadline=None)
@given(st.floats(-15, 15))
def test_k3_is_never_negative_and_zero_only_at_equality(difference: float) -> None:
    value = float(kl_per_token(torch.tensor(-20.0, dtype=torch.float64), torch.tensor(-20.0 + difference), "k3"))
    assert value >= 0.0
    assert value > 0.0 or abs(difference) < 1e-4
