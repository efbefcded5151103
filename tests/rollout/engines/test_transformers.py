from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyModel
from tiny_models import reference_logprobs as reference

from echo2.errors import EngineError, UserError
from echo2.rollout.engine import ActivationMode, Completion
from echo2.rollout.engines.transformers import TransformersEngine
from echo2.types import FinishReason, Policy, Sampling

KINDS = ["llama", "tied-llama", "qwen3", "windowed", "gpt2"]
V0, V1 = Policy(0, 0), Policy(0, 1)
PROMPT = [5, 6, 7, 8, 9]
NEVER = 1_000
"""A stop token no model has."""


def sampling(**changes: Any) -> Sampling:
    settled = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 10, "seed": 3, "stop_token_ids": (NEVER,)}
    return Sampling(**{**settled, **changes})


@asynccontextmanager
async def serving(tiny: TinyModel, dtype: str = "float32") -> AsyncIterator[TransformersEngine]:
    """An engine with version 0 installed."""
    engine = TransformersEngine(tiny.folder, device="cpu", threads=1, dtype=dtype)
    await engine.prefetch(V0, tiny.snapshot(tiny.model, V0, getattr(torch, dtype)))
    await engine.activate(V0)
    try:
        yield engine
    finally:
        await engine.close()


def assert_true_logprobs(model: Any, prompt: Sequence[int], completion: Completion, temperature: float) -> None:
    assert completion.logprobs is not None
    expected = reference(model, prompt, completion.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)


async def test_top_p_samples_from_the_nucleus_and_reports_full_logprobs(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        (greedy,) = await engine.generate(PROMPT, sampling(top_p=1e-6), 1)
        group = await engine.generate(PROMPT, sampling(top_p=0.5, max_new_tokens=1), 64)
    with torch.no_grad():
        probabilities = torch.softmax(tiny.model(input_ids=torch.tensor([PROMPT])).logits[0, -1], -1)
    assert greedy.token_ids[0] == int(probabilities.argmax())
    ordered, order = probabilities.sort(descending=True)
    nucleus = set(order[: int((ordered.cumsum(0) < 0.5).sum()) + 1].tolist())
    assert {completion.token_ids[0] for completion in group} <= nucleus
    assert_true_logprobs(tiny.model, PROMPT, group[0], 1.0)


async def test_nothing_is_generated_before_the_first_install(tiny: TinyModel) -> None:
    """E11"""
    engine = TransformersEngine(tiny.folder, device="cpu", threads=1, dtype="float32")
    assert engine.installed is None
    with pytest.raises(EngineError, match="must be installed"):
        await engine.generate(PROMPT, sampling(), 1)
    with pytest.raises(EngineError, match="must be prefetched"):
        await engine.activate(V0)
    assert engine.installed is None
    await engine.close()


@pytest.mark.parametrize("tiny", ["tied-llama"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.norm.weight": None}, "1 missing"),
        ({"extra": torch.zeros(2)}, "1 unknown"),
        ({"model.norm.weight": torch.zeros(31)}, "must have shape"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.bfloat16)}, "must be torch.float32"),
    ],
)
async def test_a_snapshot_that_does_not_fit_leaves_the_old_policy_serving(
    tiny: TinyModel, changes: dict[str, Any], words: str
) -> None:
    async with serving(tiny) as engine:
        before = await engine.generate(PROMPT, sampling(), 2)
        with pytest.raises(EngineError, match=words):
            await engine.prefetch(V1, tiny.snapshot(tiny.fresh(1), V1, **changes))
        with pytest.raises(EngineError, match="must be prefetched"):
            await engine.activate(V1)
        assert engine.installed == V0
        assert await engine.generate(PROMPT, sampling(), 2) == before


async def test_a_snapshot_of_another_type_or_policy_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    """E12"""
    async with serving(tiny) as engine:
        with pytest.raises(EngineError, match="must hold float32, it holds bfloat16"):
            await engine.prefetch(V1, tiny.snapshot(tiny.fresh(1), V1, torch.bfloat16))
        with pytest.raises(EngineError, match=r"0\.2 was asked for"):
            await engine.prefetch(Policy(0, 2), tiny.snapshot(tiny.fresh(1), V1))
        with pytest.raises(EngineError, match=r"must hold model\.safetensors"):
            await engine.prefetch(V1, tmp_path / "nowhere")


async def test_bfloat16_snapshots_arrive_unrounded_whatever_the_processor_computes_in(tiny: TinyModel) -> None:
    async with serving(tiny, "bfloat16") as engine:
        (completion,) = await engine.generate(PROMPT, sampling(), 1)
        for parameter in tiny.model.parameters():
            parameter.data = parameter.data.bfloat16().to(engine.compute_dtype)
        expected = reference(tiny.model, PROMPT, completion.token_ids, 1.0)
    tolerance = 1e-3 if engine.compute_dtype is torch.float32 else 5e-2
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=tolerance, rtol=0)


async def test_the_context_limits_prompts_and_replies(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        (completion,) = await engine.generate([1] * 60, sampling(max_new_tokens=50), 1)
        assert len(completion.token_ids) == 4
        assert completion.finish_reason is FinishReason.LENGTH
        with pytest.raises(EngineError, match=r"1 to 63 tokens \(context 64\), it has 64"):
            await engine.generate([1] * 64, sampling(), 1)
        with pytest.raises(EngineError, match="it has 0"):
            await engine.generate([], sampling(), 1)


async def test_numbers_that_are_none_fail_the_generation(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        broken = tiny.fresh(1)
        broken.get_output_embeddings().weight.data.fill_(float("nan"))
        await engine.prefetch(V1, tiny.snapshot(broken, V1))
        await engine.activate(V1)
        with pytest.raises(EngineError, match="must be numbers"):
            await engine.generate(PROMPT, sampling(), 2)


async def test_a_closed_engine_says_so(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        pass
    with pytest.raises(EngineError, match="must be installed"):
        await engine.generate(PROMPT, sampling(), 1)


def test_a_directory_without_a_model_and_a_device_that_is_none_are_the_users_fault(tiny: TinyModel) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        TransformersEngine(tiny.folder / "nowhere")
    with pytest.raises(UserError, match="device must be"):
        TransformersEngine(tiny.folder, device="abacus")
