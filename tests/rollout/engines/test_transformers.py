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
from echo2.rollout.engines.reading import SlotReader, WholeReader
from echo2.rollout.engines.slots import GROWTH
from echo2.rollout.engines.transformers import TransformersEngine
from echo2.types import FinishReason, Policy, Sampling

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


# ---- batching ------------------------------------------------------------------------------------------------------


class Reads:
    """How many tokens the model was given in each call, rows times length."""

    def __init__(self, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, int]] = []
        forward = engine._model.forward

        def counted(*arguments: Any, input_ids: torch.Tensor, **named: Any) -> Any:
            self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
            return forward(*arguments, input_ids=input_ids, **named)

        monkeypatch.setattr(engine._model, "forward", counted)


async def test_a_groups_prompt_is_read_once_and_rows_that_ended_are_not_fed(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny) as engine:
        reads = Reads(engine, monkeypatch)
        group = await engine.generate(PROMPT, sampling(stop_token_ids=tuple(range(0, 64, 6))), 6)
    assert reads.shapes[0] == (1, len(PROMPT))
    lengths = [len(completion.token_ids) for completion in group]
    growing = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert [rows for rows, _ in reads.shapes[1:]] == growing


async def test_groups_that_overlap_share_their_steps(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tiny) as engine:
        reads = Reads(engine, monkeypatch)
        await asyncio.gather(*(engine.generate([number, 2, 3], sampling(), 3) for number in range(4)))
    assert reads.shapes.count((12, 1)) >= 8


async def test_with_little_memory_rows_wait_for_places_and_get_the_same_tokens(tiny: TinyModel) -> None:
    stops = tuple(range(0, 64, 6))
    async with serving(tiny) as engine:
        free = [await engine.generate([number, 2, 3], sampling(stop_token_ids=stops), 5) for number in range(3)]
        engine._batch._states_bytes = 3 * engine._batch._reader.bytes_per_token * (13 + GROWTH)
        most = 0
        step = engine._batch.step

        def watched(policy: Policy) -> None:
            nonlocal most
            most = max(most, engine._batch.rows)
            step(policy)

        engine._batch.step = watched  # type: ignore[method-assign]
        tight = await asyncio.gather(
            *(engine.generate([number, 2, 3], sampling(stop_token_ids=stops), 5) for number in range(3))
        )
    assert most == 3
    assert [[c.token_ids for c in group] for group in tight] == [[c.token_ids for c in group] for group in free]


@pytest.mark.parametrize("mode", [ActivationMode.CONTINUE, ActivationMode.DRAIN])
async def test_replies_that_wait_for_places_outlive_a_switch(tiny: TinyModel, mode: ActivationMode) -> None:
    newer = tiny.fresh(1)
    async with serving(tiny) as engine:
        await engine.prefetch(V1, tiny.snapshot(newer, V1))
        engine._batch._states_bytes = 1
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.generate(PROMPT, sampling(max_new_tokens=30), 3))
            while engine._batch.rows == 0:
                await asyncio.sleep(0)
            await engine.activate(V1, mode)
    first, *others = running.result()
    newest = V1 if mode is ActivationMode.CONTINUE else V0
    assert (first.policy_min, first.policy_max) == (V0, newest)
    for completion in others:
        assert (completion.policy_min, completion.policy_max) == (newest, newest)
        assert_true_logprobs(tiny.model if newest == V0 else newer, PROMPT, completion, 1.0)


async def test_a_conversation_is_read_on_from_where_it_was_until_a_switch(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = tiny.fresh(1)
    async with serving(tiny) as engine:
        reads = Reads(engine, monkeypatch)
        first = list(range(12))
        (said,) = await engine.generate(first, sampling(), 1)
        reads.shapes.clear()
        second = [*first, *said.token_ids, 7, 8]
        (reply,) = await engine.generate(second, sampling(), 1)
        assert reads.shapes[0] == (1, 3)  # the reply's last token was never fed
        assert_true_logprobs(tiny.model, second, reply, 1.0)
        await engine.prefetch(V1, tiny.snapshot(newer, V1))
        await engine.activate(V1)
        reads.shapes.clear()
        (reply,) = await engine.generate(second, sampling(), 1)
        assert reads.shapes[0] == (1, len(second))
        assert_true_logprobs(newer, second, reply, 1.0)


async def test_a_reply_is_heard_when_it_ends_not_when_its_group_does(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        running_when_heard: list[bool] = []
        stops = tuple(range(0, 64, 6))
        await engine.generate(
            PROMPT,
            sampling(stop_token_ids=stops, max_new_tokens=40),
            8,
            lambda position, reply: running_when_heard.append(bool(engine._batch.running)),
        )
    assert running_when_heard[0]
    assert not running_when_heard[-1]


@pytest.mark.parametrize("tiny", ["capped", "convolutional"], indirect=True)
async def test_models_of_another_make_run_one_group_at_a_time(tiny: TinyModel) -> None:
    newer = tiny.fresh(1)
    async with serving(tiny) as engine:
        assert isinstance(engine._batch._reader, WholeReader)
        stops = tuple(range(0, 64, 6))
        prompts = [PROMPT, [1, 2, 3]]
        groups = await asyncio.gather(*(engine.generate(p, sampling(stop_token_ids=stops), 3) for p in prompts))
        await engine.prefetch(V1, tiny.snapshot(newer, V1))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.generate(PROMPT, sampling(max_new_tokens=30), 3))
            while engine._batch.rows == 0:
                await asyncio.sleep(0)
            await engine.activate(V1, ActivationMode.CONTINUE)
    for prompt, completions in zip(prompts, groups, strict=True):
        for completion in completions:
            assert_true_logprobs(tiny.model, prompt, completion, 1.0)
    for completion in running.result():
        assert completion.versions is not None
        whose = torch.tensor(completion.versions) == 1
        expected = reference(newer, PROMPT, completion.token_ids, 1.0)[whose]
        torch.testing.assert_close(torch.tensor(completion.logprobs)[whose], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("tiny", ["llama", "windowed", "gpt2"], indirect=True)
async def test_usual_models_run_in_slots(tiny: TinyModel) -> None:
    async with serving(tiny) as engine:
        assert isinstance(engine._batch._reader, SlotReader)
