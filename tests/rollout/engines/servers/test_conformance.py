"""The conformance suite over server engines, against stand-ins (``test_real_vllm`` runs it against a real one).

An OpenAI-style endpoint has neither weights nor versions of its own, so the suite has nothing to ask of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from engine_conformance import V0, V1, EngineConformance, Subject
from fake_servers import Backend, FakeServer, FakeSglang, FakeVllm, HeldBlocks, SampledParallax, listening
from noted_events import NotedEvents
from tiny_models import TinyModel, reference_logprobs

from echo2.config.sections import ServerSection
from echo2.data.task import Message
from echo2.rollout.engine import Capabilities, Completion, Engine, Heard
from echo2.rollout.engines.parallax import Parallax
from echo2.rollout.engines.servers.checkpoint import Checkpoint
from echo2.rollout.engines.servers.dialect import Dialect, Facts
from echo2.rollout.engines.servers.engine import ServerEngine
from echo2.rollout.engines.servers.host import ExternalHost
from echo2.rollout.engines.servers.speaking import SpeakingServerEngine
from echo2.rollout.engines.sglang import Sglang
from echo2.rollout.engines.vllm import Vllm
from echo2.types import Policy, Sampling


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


class ByText:
    """A server that takes conversations, asked with tokens as text, so that whatever needs no ids is tested."""

    def __init__(self, engine: SpeakingServerEngine) -> None:
        self._engine = engine
        self.prefetch, self.activate, self.close = engine.prefetch, engine.activate, engine.close

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def installed(self) -> Policy | None:
        return self._engine.installed

    @property
    def fault(self) -> str | None:
        return self._engine.fault

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        asked: list[Message] = [{"role": "user", "content": " ".join(map(str, token_ids))}]
        said = [
            Completion(tuple(map(int, one.text.split())), None, one.policy_min, one.policy_max, one.finish_reason)
            for one in await self._engine.speak(asked, sampling, n, thinking=False)
        ]
        for position, completion in enumerate(said):
            if heard is not None:
                heard(position, completion)
        return said


class OfParallax(Served):
    """A network that takes weights from blocks."""

    lacks = MappingProxyType(
        {
            "test_a_sampled_stop_token_is_kept_and_none_is_added": "it gives text, in which no token ends a reply",
            "test_a_reply_ends_where_the_context_ends": "its context is in tokens, which nobody here knows",
            "test_a_prompt_that_cannot_be_answered_is_an_engine_error": "its prompts are conversations, of any length",
        }
    )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        backend, blocks = Backend(), None if self.restarts else HeldBlocks()
        backend.load(self.tiny.folder / "base") if not self.restarts else None
        fake, dialect = SampledParallax(backend, blocks), Parallax(blocks, now=lambda: 1000.0)
        async with listening(fake.application()) as url:
            settings = ServerSection(url=url, start_timeout_s=20.0, request_timeout_s=20.0)
            host = RestartedHost(dialect, settings, fake) if self.restarts else ExternalHost(dialect, settings, "")
            folder: Path = self.tiny.folder / "engine"
            engine = SpeakingServerEngine(dialect, host, self.tiny.folder, folder, "float32", settings, NotedEvents())
            try:
                yield ByText(engine)
            finally:
                await engine.close()


class RestartedParallax(OfParallax):
    restarts = True


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


class TestParallaxNetwork(EngineConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
        monkeypatch.setattr("echo2.rollout.engines.parallax.POLL_S", 0.0)
        return subject_of(OfParallax, "tied-llama", tmp_path)


class TestParallaxThatIsStartedAnew(EngineConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return subject_of(RestartedParallax, "qwen3", tmp_path)
