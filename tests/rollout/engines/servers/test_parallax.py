"""Servers that take conversations: Parallax, and any OpenAI-style endpoint as something to evaluate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from building import prompt
from fake_servers import Backend, FakeParallax, HeldBlocks, listening
from loopback import FakeClock
from noted_events import NotedEvents
from safetensors.torch import load
from tiny_models import TinyModel

from echo2.config.sections import ServerSection
from echo2.data.chat import ByteChat
from echo2.data.task import Message, Score, Task
from echo2.errors import EngineError
from echo2.rollout.engine import Engine
from echo2.rollout.engines import build_engine
from echo2.rollout.engines.parallax import Parallax
from echo2.rollout.engines.servers.host import ExternalHost
from echo2.rollout.engines.servers.speaking import SpeakingServerEngine
from echo2.rollout.episode import run_group
from echo2.transport import json_line
from echo2.transport.messages import LeaseGrant
from echo2.types import Policy, Prompt, RowStatus, Sampling, Trajectory

V0, V1 = Policy(0, 0), Policy(0, 1)
SAMPLING = Sampling(0.7, 0.9, 40, 3)
ASKED: list[Message] = [{"role": "user", "content": "Hello?"}]


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    return TinyModel("llama", tmp_path)


@asynccontextmanager
async def network(
    tiny: TinyModel, fake: FakeParallax, blocks: HeldBlocks | None, start_timeout_s: float = 20.0
) -> AsyncIterator[SpeakingServerEngine]:
    dialect = Parallax(blocks, now=lambda: 1000.0)
    async with listening(fake.application()) as url:
        settings = ServerSection(url=url, start_timeout_s=start_timeout_s, request_timeout_s=20.0)
        host, folder = ExternalHost(dialect, settings, ""), tiny.folder / "engine"
        engine = SpeakingServerEngine(dialect, host, tiny.folder, folder, "float32", settings, NotedEvents())
        try:
            yield engine
        finally:
            await engine.close()


async def install(engine: Engine, tiny: TinyModel, policy: Policy) -> dict[str, Any]:
    model = tiny.fresh(policy.version)
    await engine.prefetch(policy, tiny.snapshot(model, policy))
    await engine.activate(policy)
    return dict(model.state_dict())


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.rollout.engines.parallax.POLL_S", 0.0)
    monkeypatch.setattr(json_line, "FIRST_PAUSE_S", 0.0)


async def test_a_refit_publishes_every_tensor_and_waits_for_the_nodes(tiny: TinyModel) -> None:
    fake, blocks = FakeParallax(Backend()), HeldBlocks()
    async with network(tiny, fake, blocks) as engine:
        await install(engine, tiny, V0)
        old = set(blocks.held)
        fake.looks_until_taken = 2
        weights = await install(engine, tiny, V1)
        assert engine.installed == V1
        assert fake.looks_until_taken < 0  # it looked until the nodes had it
    assert [order["version"] for order in fake.refits] == [0, 1]
    assert fake.refits[0]["time_stamp"] == 1000.0 < fake.refits[1]["time_stamp"]
    for name, block in fake.refits[1]["index_map"].items():
        (held,) = load(blocks.held[block]).items()
        assert held[0] == name and held[1].equal(weights[name])
    assert set(blocks.held) == set(fake.refits[1]["index_map"].values()) != old  # nobody needs the version before
    assert blocks.closed


async def test_nodes_that_never_take_a_refit_leave_the_old_policy(tiny: TinyModel) -> None:
    fake = FakeParallax(Backend())
    async with network(tiny, fake, HeldBlocks(), start_timeout_s=0.5) as engine:
        await install(engine, tiny, V0)
        fake.pretends = True
        with pytest.raises(EngineError, match=r"must have taken policy 0\.1 within 0\.5 s, they report an older one"):
            await install(engine, tiny, V1)
        assert engine.installed == V0


async def test_a_network_without_a_way_for_weights_is_not_served_from(tiny: TinyModel) -> None:
    async with network(tiny, FakeParallax(Backend()), None) as engine:
        with pytest.raises(EngineError, match=r"takes no weights while it runs: .*server\.peers names its network"):
            await install(engine, tiny, V0)


class Greeting(Task):
    name = "greeting"

    def size(self, split: Any) -> int:
        return 1

    def prompt(self, split: Any, index: int) -> Prompt:
        return prompt(index, self.name)

    def messages(self, prompt: Prompt) -> list[Message]:
        return ASKED

    def score(self, prompt: Prompt, reply: str) -> Score:
        return Score(float(reply == "Hello."), "scored")


def lease() -> LeaseGrant:
    return LeaseGrant("lease", 1, 0, prompt(0, "greeting"), (0, 1, 2), SAMPLING, V0, 30.0)


async def records(engine: Engine) -> list[Trajectory]:
    import msgspec

    rows = await run_group(engine, Greeting(), ByteChat(), lease(), False, FakeClock())
    assert {row.status for row in rows} == {RowStatus.FINISHED}, rows
    return [msgspec.msgpack.decode(row.record, type=Trajectory) for row in rows]


async def test_text_becomes_records_that_say_so_and_carry_no_logprobs(tiny: TinyModel) -> None:
    """The learner gives them w = 1 (``tests/learning``)."""
    fake = FakeParallax(Backend())
    fake.busy = 2
    async with network(tiny, fake, HeldBlocks()) as engine:
        await install(engine, tiny, V0)
        fake.backend.seen.clear()
        found = await records(engine)
        with pytest.raises(EngineError, match="must be asked with messages"):
            await engine.generate([1], SAMPLING, 1)
    for record in found:
        assert record.logprob_convention is None
        assert record.omega["retokenised"] is True
        assert (record.policy_min, record.policy_max, record.reward) == (V0, V0, 1.0)
        assert list(record.segments[1].tokens) == ByteChat().encode_reply("Hello.")
    sent = fake.backend.seen
    assert [body["messages"] for body in sent] == [ASKED] * 5  # two of them again
    assert len({body["seed"] for body in sent}) == 3
    assert {(body["temperature"], body["top_p"], body["max_tokens"]) for body in sent} == {(0.7, 0.9, 40)}


async def test_an_endpoint_can_be_evaluated() -> None:
    fake = FakeParallax(Backend(), model="gpt")
    async with listening(fake.application()) as url:
        server = ServerSection(url=f"{url}/v1", model="gpt", request_timeout_s=20.0)
        engine = build_engine("openai", None, device="cpu", threads=0, dtype="float32", server=server)
        await engine.prefetch(V0, Path("nowhere"))
        await engine.activate(V0)
        assert [record.reward for record in await records(engine)] == [1.0, 1.0, 1.0]
        await engine.close()
