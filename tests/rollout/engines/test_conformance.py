"""The conformance suite over the engines that need no server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
from engine_conformance import V0, V1, EngineConformance, Subject
from tiny_models import TinyModel, reference_logprobs

from echo2.data.chat import ByteChat
from echo2.rollout.engine import Engine
from echo2.rollout.engines.scripted import ScriptedEngine
from echo2.rollout.engines.transformers import TransformersEngine
from echo2.types import Policy

KINDS = ["llama", "tied-llama", "qwen3", "windowed", "gpt2"]


class Embedded(Subject):
    prompts = ((5, 6, 7, 8, 9), (1,), tuple(range(20)), (3, 4, 5))
    vocabulary, context = 64, 64

    def __init__(self, tiny: TinyModel) -> None:
        self.tiny = tiny
        self.models = {V0: tiny.model, V1: tiny.fresh(1)}
        self.snapshots = {policy: tiny.snapshot(model, policy) for policy, model in self.models.items()}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        engine = TransformersEngine(self.tiny.folder, device="cpu", threads=1, dtype="float32")
        try:
            yield engine
        finally:
            await engine.close()

    def reference(
        self, policy: Policy, prompt: Sequence[int], reply: Sequence[int], temperature: float
    ) -> Sequence[float]:
        values: list[float] = reference_logprobs(self.models[policy], prompt, reply, temperature).tolist()
        return values


class TestTransformersEngine(EngineConformance):
    @pytest.fixture(params=KINDS)
    def subject(self, request: Any, tmp_path: Path) -> Subject:
        return Embedded(TinyModel(request.param, tmp_path))


CHAT = ByteChat()


class Scripted(Subject):
    prompts = tuple(
        CHAT.render([{"role": "user", "content": f"What is {question}?"}], thinking=False)
        for question in ("12+30", "1+1", "100-20+5")
    )
    vocabulary, context = 300, 1 << 16
    snapshots = MappingProxyType({V0: Path("nowhere"), V1: Path("nowhere")})
    lacks = MappingProxyType(
        {
            "test_a_spoilt_snapshot_leaves_the_old_version_serving": "it has no weights",
            "test_the_token_limit_cuts_and_says_so": "its replies have the length that its script says",
            "test_a_reply_ends_where_the_context_ends": "it has no context",
            "test_a_prompt_that_cannot_be_answered_is_an_engine_error": "it answers any prompt",
            "test_a_sampled_stop_token_is_kept_and_none_is_added": "its replies end where its script says",
            "test_groups_that_overlap_keep_their_own_temperatures_and_lengths": "it has no temperature",
            "test_top_p_samples_from_the_nucleus_and_reports_full_logprobs": "it has no distribution",
        }
    )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        async def turns(seconds: float) -> None:
            for _ in range(int(seconds)):
                await asyncio.sleep(0)

        def lasting(prompt_tokens: int, n: int, random: Random) -> float:
            return 20.0 * n

        def script(prompt: str, random: Random, policy: Policy) -> str:
            return f"{policy.version} {random.randint(100, 999)}"

        yield ScriptedEngine(script, duration=lasting, sleep=turns)

    def reference(self, policy: Policy, prompt: Sequence[int], reply: Sequence[int], temperature: float) -> None:
        return None


class TestScriptedEngine(EngineConformance):
    @pytest.fixture
    def subject(self) -> Subject:
        return Scripted()
