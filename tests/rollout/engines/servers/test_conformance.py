"""The conformance suite over server engines, against stand-ins (tests/integration runs it against a real vLLM)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_conformance import V0, V1, EngineConformance, Subject
from fake_servers import Backend, FakeServer, FakeSglang, FakeVllm, listening
from noted_events import NotedEvents
from tiny_models import TinyModel, reference_logprobs

from echo2.config.sections import ServerSection
from echo2.rollout.engine import Engine
from echo2.rollout.engines.servers.checkpoint import Checkpoint
from echo2.rollout.engines.servers.dialect import Dialect, Facts
from echo2.rollout.engines.servers.engine import ServerEngine
from echo2.rollout.engines.servers.host import ExternalHost
from echo2.rollout.engines.sglang import Sglang
from echo2.rollout.engines.vllm import Vllm
from echo2.types import Policy


class RestartedHost(ExternalHost):
    """As a managed host, whose server starts in no time: it has the weights it is begun with."""

    def __init__(self, dialect: Dialect, settings: ServerSection, fake: FakeServer) -> None:
        super().__init__(dialect, settings, "")
        self._fake = fake

    @property
    def is_managed(self) -> bool:
        return True

    async def begin(self, checkpoint: Checkpoint) -> Facts:
        self._fake.backend.load(checkpoint.folder)
        self._fake.model = f"policy-{checkpoint.policy}"
        return await super().begin(checkpoint)


class Served(Subject):
    prompts = ((5, 6, 7, 8, 9), (1,), tuple(range(20)), (3, 4, 5))
    vocabulary, context = 64, 64
    made: Callable[[Backend], FakeServer]
    dialect: Callable[[], Dialect]
    restarts = False

    def __init__(self, tiny: TinyModel) -> None:
        self.tiny = tiny
        self.models = {V0: tiny.model, V1: tiny.fresh(1)}
        self.snapshots = {policy: tiny.snapshot(model, policy) for policy, model in self.models.items()}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        backend = Backend()
        backend.load(self.tiny.folder / "base") if not self.restarts else None
        fake, dialect = type(self).made(backend), type(self).dialect()
        async with listening(fake.application()) as url:
            settings = ServerSection(url=url, start_timeout_s=20.0, request_timeout_s=20.0)
            host = RestartedHost(dialect, settings, fake) if self.restarts else ExternalHost(dialect, settings, "")
            folder: Path = self.tiny.folder / "engine"
            engine = ServerEngine(dialect, host, self.tiny.folder, folder, "float32", settings, NotedEvents())
            try:
                yield engine
            finally:
                await engine.close()

    def reference(
        self, policy: Policy, prompt: Sequence[int], reply: Sequence[int], temperature: float
    ) -> Sequence[float]:
        values: list[float] = reference_logprobs(self.models[policy], prompt, reply, temperature).tolist()
        return values


class ByGenerate(Served):
    made, dialect = FakeVllm, Vllm


class ByCompletions(Served):
    dialect = Vllm

    @staticmethod
    def made(backend: Backend) -> FakeServer:
        return FakeVllm(backend, generate=False)


class Restarted(Served):
    dialect = Vllm
    restarts = True

    @staticmethod
    def made(backend: Backend) -> FakeServer:
        return FakeVllm(backend, generate=False, weights=False)


class OfSglang(Served):
    made, dialect = FakeSglang, Sglang


def subject_of(kind: type[Served], model: str, folder: Path) -> Subject:
    tiny = TinyModel(model, folder)
    tiny.fresh(9).save_pretrained(folder / "base")
    return kind(tiny)


class TestVllmByGenerate(EngineConformance):
    @pytest.fixture(params=["tied-llama"])
    def subject(self, request: Any, tmp_path: Path) -> Subject:
        return subject_of(ByGenerate, request.param, tmp_path)


class TestVllmByCompletions(EngineConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return subject_of(ByCompletions, "qwen3", tmp_path)


class TestVllmThatTakesNoWeights(EngineConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return subject_of(Restarted, "llama", tmp_path)


class TestSglang(EngineConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return subject_of(OfSglang, "qwen3", tmp_path)
