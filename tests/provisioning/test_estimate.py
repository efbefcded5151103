from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.provisioning.estimate import (
    Workload,
    estimate,
    estimated_offers,
    kv_bytes_per_token,
    rollouts_per_s,
)
from echo2.provisioning.gpus import GPUS, Gpu
from echo2.provisioning.prices.quotes import Quote

ROUND = Gpu("round", memory_gb=10.0, bandwidth_gb_per_s=1000.0, bf16_tflops=100.0)


def workload(**changes: Any) -> Workload:
    given = {
        "parameters": 1e9,
        "kv_bytes_per_token": 1e5,
        "prompt_tokens": 100,
        "reply_tokens": 200,
        "max_sequences": 100,
    }
    return Workload(**{**given, **changes})


def test_a_machine_bound_by_bytes() -> None:
    # 2 GB of weights, 7 GB for keys and values at 30 MB a sequence: 233, cut to 100. At half the peaks a step reads
    # 2 GB + 100 · 0.1 MB · (100 + 100) = 4 GB in 8 ms and computes 2·10⁹·100 operations in 4 ms; a prefill takes
    # 2·10⁹·100 / 5·10¹³ = 4 ms. 100 replies: 100 · 4 ms + 200 · 8 ms = 2 s.
    found = estimate(workload(), ROUND)
    assert (found.sequences, found.copies, found.bound_by) == (100, 1, "bytes")
    assert found.step_s == pytest.approx(0.008)
    assert found.prefill_s == pytest.approx(0.004)
    assert found.rollouts_per_s == pytest.approx(50.0)
    assert found.tokens_per_s == pytest.approx(12_500.0)


def test_a_group_shares_its_prefill() -> None:
    # 100 · 4 ms / 8 + 1.6 s = 1.65 s
    assert estimate(workload(group_size=8), ROUND).rollouts_per_s == pytest.approx(100 / 1.65)


def test_a_machine_bound_by_operations() -> None:
    # keys and values of 1 kB a token: a step reads 2.02 GB in 4.04 ms; 200 sequences compute 8 ms
    found = estimate(workload(kv_bytes_per_token=1e3, max_sequences=200), ROUND)
    assert (found.bound_by, found.step_s) == ("operations", pytest.approx(0.008))


def test_memory_limits_the_sequences() -> None:
    # 7 GB / (0.1 MB · 1100 tokens) = 63.6
    assert estimate(workload(reply_tokens=1000), ROUND).sequences == 63


def test_a_machine_runs_as_many_copies_as_it_has_room_for() -> None:
    one, four = estimate(workload(), ROUND), estimate(workload(), ROUND, 4)
    assert (four.copies, four.rollouts_per_s) == (4, pytest.approx(4 * one.rollouts_per_s))
    # 12 GB of weights need two GPUs of 9 GB usable: five GPUs hold two copies
    large = estimate(workload(parameters=6e9), ROUND, 5)
    assert (large.copies, large.sequences) == (2, 100)


def test_a_model_that_does_not_fit_is_refused_with_what_would_hold_it() -> None:
    with pytest.raises(
        UserError, match=r"got 65.5 GB for 28.8 GB usable on 1 RTX5090: take 3 or more, or a larger GPU"
    ):
        rollouts_per_s(workload(parameters=32.75e9), "RTX 5090")


def test_keys_and_values_of_qwen3_8b() -> None:
    assert kv_bytes_per_token(layers=36, kv_heads=8, head_dim=128) == 147_456


def test_the_measured_peak_of_an_rtx_5090_lies_below_the_roofline_and_near_the_default_efficiency() -> None:
    # vLLM, Llama-3.1-8B in NVFP4 (4 bits and a scale of 8 for every 16): 8,691 tokens/s at its best, lengths not said
    llama: dict[str, Any] = {
        "parameters": 8.03e9,
        "bytes_per_parameter": 4.5 / 8,
        "kv_bytes_per_token": kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128),
        "prompt_tokens": 128,
        "reply_tokens": 128,
    }
    measured = 8691.0
    assert measured < estimate(Workload(**llama, efficiency=1.0), GPUS["RTX5090"]).tokens_per_s
    assert 0.5 < estimate(Workload(**llama), GPUS["RTX5090"]).tokens_per_s / measured < 2.0


def test_the_pool_of_the_paper_is_of_the_size_that_its_saving_implies() -> None:
    # Section 5: with S = 3, 8 to 13 RTX 5090 deliver the 2.10 trajectories/s of equation (2): 0.16 to 0.26 each.
    # The mean length of replies is not given; the limit is 8,192 tokens, and 3,000 to 4,000 are what it takes.
    qwen: dict[str, Any] = {"parameters": 8.2e9, "kv_bytes_per_token": 147_456, "prompt_tokens": 200, "group_size": 16}
    rates = [rollouts_per_s(Workload(**qwen, reply_tokens=tokens), "RTX5090") for tokens in (3000, 3500, 4000)]
    assert all(0.15 < rate < 0.35 for rate in rates)


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": 0.0},
        {"parameters": math.nan},
        {"reply_tokens": 0},
        {"prompt_tokens": -1},
        {"kv_bytes_per_token": math.inf},
        {"efficiency": 0.0},
        {"efficiency": 1.1},
        {"group_size": 0},
        {"max_sequences": 0},
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(changes))} must be"):
        workload(**changes)


@given(
    st.sampled_from(sorted(GPUS)),
    st.floats(1e8, 8e9),
    st.floats(0, 4000),
    st.floats(1, 8000),
    st.integers(1, 64),
    st.integers(1, 8),
)
def test_no_estimate_exceeds_the_peaks(
    name: str, parameters: float, prompt: float, reply: float, group_size: int, gpus: int
) -> None:
    gpu = GPUS[name]
    work = workload(parameters=parameters, prompt_tokens=prompt, reply_tokens=reply, group_size=group_size)
    found = estimate(work, gpu, gpus)
    assert 0 < found.rollouts_per_s * reply * 2 * parameters <= gpus * gpu.bf16_tflops * 1e12
    better = estimate(
        workload(parameters=parameters, prompt_tokens=prompt, reply_tokens=reply, efficiency=1.0), gpu, gpus
    )
    assert better.rollouts_per_s >= found.rollouts_per_s / group_size


def test_offers_from_prices_are_marked_and_what_cannot_be_estimated_is_told() -> None:
    quotes = [
        Quote(name="a", provider="p", gpu="RTX5090", gpus=2, usd_per_h=1.0),
        Quote(name="b", provider="p", gpu="Mystery", gpus=1, usd_per_h=1.0),
    ]
    (made,), (sentence,) = estimated_offers(quotes, workload(), count=3)
    assert (made.name, made.count, made.usd_per_h, made.estimated) == ("a", 3, 1.0, True)
    assert made.rollouts_per_s == rollouts_per_s(workload(), "RTX5090", 2)
    assert sentence.startswith("b: throughput can be estimated for")
