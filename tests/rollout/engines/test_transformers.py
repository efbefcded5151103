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


@pytest.mark.parametrize("tiny", KINDS, indirect=True)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_logprobs_are_those_of_a_fresh_pass_at_the_temperature(tiny: TinyModel, temperature: float) -> None:
    """C06, E01: right log-probs also prove that tied and untied weights arrived."""
    async with serving(tiny) as engine:
        for completion in await engine.generate(PROMPT, sampling(temperature=temperature), 4):
            assert_true_logprobs(tiny.model, PROMPT, completion, temperature)
            assert len(completion.token_ids) == 10
            assert completion.finish_reason is FinishReason.LENGTH
            assert (completion.policy_min, completion.policy_max, completion.versions) == (V0, V0, None)


@pytest.mark.parametrize("tiny", KINDS, indirect=True)
async def test_groups_of_different_lengths_grow_together_as_they_would_alone(tiny: TinyModel) -> None:
    """B11: padding that aligns groups changes nothing."""
    prompts = [PROMPT, [1], list(range(20)), [3, 4, 5]]
    orders = [sampling(seed=i, temperature=0.7 + 0.2 * i, max_new_tokens=4 + 3 * i) for i in range(4)]
    async with serving(tiny) as engine:
        together = await asyncio.gather(*(engine.generate(p, s, 3) for p, s in zip(prompts, orders, strict=True)))
        alone = [await engine.generate(p, s, 3) for p, s in zip(prompts, orders, strict=True)]
    for prompt, order, group, other in zip(prompts, orders, together, alone, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in other]
        for completion in group:
            assert_true_logprobs(tiny.model, prompt, completion, order.temperature)


async def test_a_seed_fixes_every_reply_and_rows_differ(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        first, again = [await engine.generate(PROMPT, sampling(), 4) for _ in range(2)]
        other = await engine.generate(PROMPT, sampling(seed=4), 4)
    assert first == again
    assert len({completion.token_ids for completion in first + other}) == 8


async def test_a_sampled_stop_token_is_kept_and_none_is_added(tiny: TinyModel) -> None:
    """B07"""
    async with serving(tiny) as engine:
        stops = tuple(range(0, 64, 6))
        group = await engine.generate(PROMPT, sampling(stop_token_ids=stops, max_new_tokens=8), 16)
    reasons = {completion.finish_reason for completion in group}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in group:
        ended = completion.finish_reason is FinishReason.STOP
        assert sum(token in stops for token in completion.token_ids) == int(ended)
        assert (completion.token_ids[-1] in stops) == ended
        assert len(completion.token_ids) == 8 or ended
        assert_true_logprobs(tiny.model, PROMPT, completion, 1.0)


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


async def halfway(engine: TransformersEngine) -> None:
    """Return once a running generation has a few tokens."""
    for _ in range(1_000_000):
        if (running := engine._batch.running) and len(running[0].rows[0].token_ids) >= 3:
            return
        await asyncio.sleep(0)
    raise AssertionError("the generation never got that far")


async def switch_under_way(engine: TransformersEngine, mode: ActivationMode) -> list[Completion] | EngineError:
    async def generate() -> list[Completion] | EngineError:
        try:
            return await engine.generate(PROMPT, sampling(max_new_tokens=40), 3)
        except EngineError as error:
            return error

    async with asyncio.TaskGroup() as group:
        running = group.create_task(generate())
        await halfway(engine)
        await engine.activate(V1, mode)
    return running.result()


@pytest.mark.parametrize("tiny", ["qwen3", "gpt2", "windowed"], indirect=True)
async def test_drain_lets_a_generation_finish_under_the_version_it_began_with(tiny: TinyModel) -> None:
    newer = tiny.fresh(1)
    async with serving(tiny) as engine:
        undisturbed = await engine.generate(PROMPT, sampling(max_new_tokens=40), 3)
        await engine.prefetch(V1, tiny.snapshot(newer, V1))
        assert await switch_under_way(engine, ActivationMode.DRAIN) == undisturbed
        assert engine.installed == V1
        (completion,) = await engine.generate(PROMPT, sampling(), 1)
    assert completion.policy_min == V1
    assert_true_logprobs(newer, PROMPT, completion, 1.0)


@pytest.mark.parametrize("tiny", ["qwen3", "gpt2", "windowed"], indirect=True)
async def test_continue_goes_on_under_the_new_version_and_says_which_tokens_are_whose(tiny: TinyModel) -> None:
    """I5"""
    newer = tiny.fresh(1)
    async with serving(tiny) as engine:
        await engine.prefetch(V1, tiny.snapshot(newer, V1))
        group = await switch_under_way(engine, ActivationMode.CONTINUE)
    assert isinstance(group, list)
    for completion in group:
        assert (completion.policy_min, completion.policy_max) == (V0, V1)
        assert completion.versions is not None
        assert completion.logprobs is not None
        assert list(completion.versions) == sorted(completion.versions)
        for model, version in ((tiny.model, 0), (newer, 1)):
            whose = torch.tensor(completion.versions) == version
            expected = reference(model, PROMPT, completion.token_ids, 1.0)[whose]
            torch.testing.assert_close(torch.tensor(completion.logprobs)[whose], expected, atol=1e-3, rtol=0)


async def test_abort_ends_running_generations_as_errors(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        await engine.prefetch(V1, tiny.snapshot(tiny.fresh(1), V1))
        ended = await switch_under_way(engine, ActivationMode.ABORT)
        assert isinstance(ended, EngineError)
        assert str(ended).startswith("aborted")
        assert (await engine.generate(PROMPT, sampling(), 1))[0].policy_min == V1


async def test_a_cancelled_generation_leaves_the_batch_and_the_others_alone(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        alone = await engine.generate([1, 2], sampling(seed=9), 2)
        async with asyncio.TaskGroup() as group:
            doomed = group.create_task(engine.generate(PROMPT, sampling(max_new_tokens=50), 2))
            await halfway(engine)
            other = group.create_task(engine.generate([1, 2], sampling(seed=9), 2))
            doomed.cancel()
        assert [c.token_ids for c in other.result()] == [c.token_ids for c in alone]
        assert not engine._batch.running


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
