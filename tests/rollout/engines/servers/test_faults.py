"""What a server may do wrong, and what the engine makes of it: named, mended or refused, and never a false tag."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_servers import Backend, FakeServer, FakeSglang, FakeVllm, listening
from noted_events import NotedEvents
from tiny_models import TinyModel

from echo2.config.sections import ServerSection
from echo2.errors import EngineError
from echo2.rollout.engines.servers.dialect import Dialect
from echo2.rollout.engines.servers.engine import ServerEngine
from echo2.rollout.engines.servers.host import ExternalHost
from echo2.rollout.engines.sglang import Sglang
from echo2.rollout.engines.vllm import Vllm
from echo2.types import Policy, Sampling

V0, V1, V2 = Policy(0, 0), Policy(0, 1), Policy(0, 2)
SAMPLING = Sampling(1.0, 1.0, 6, 3)
PROMPT = [5, 6, 7]
Alter = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    made = TinyModel("llama", tmp_path)
    made.fresh(9).save_pretrained(tmp_path / "base")
    return made


class Case:
    def __init__(self, tiny: TinyModel, fake: FakeServer, engine: ServerEngine, events: NotedEvents) -> None:
        self.tiny, self.fake, self.engine, self.events = tiny, fake, engine, events

    async def install(self, policy: Policy) -> None:
        await self.engine.prefetch(policy, self.tiny.snapshot(self.tiny.fresh(policy.version), policy))
        await self.engine.activate(policy)

    async def generate(self, n: int = 2, sampling: Sampling = SAMPLING) -> list[Any]:
        return await self.engine.generate(PROMPT, sampling, n)


@asynccontextmanager
async def serving(
    tiny: TinyModel, fake: FakeServer, dialect: Dialect, request_timeout_s: float = 20.0
) -> AsyncIterator[Case]:
    """An engine with version 0, before a server that is not its own."""
    fake.backend.load(tiny.folder / "base")
    events = NotedEvents()
    async with listening(fake.application()) as url:
        settings = ServerSection(url=url, start_timeout_s=5.0, request_timeout_s=request_timeout_s)
        host = ExternalHost(dialect, settings, "")
        engine = ServerEngine(dialect, host, tiny.folder, tiny.folder / "engine", "float32", settings, events)
        case = Case(tiny, fake, engine, events)
        try:
            await case.install(V0)
            yield case
        finally:
            await engine.close()


def vllm(alter: Alter) -> Alter:
    """Alter the choice of a reply."""

    def altered(answer: dict[str, Any]) -> dict[str, Any]:
        answer = json.loads(json.dumps(answer))
        answer["choices"][0] = alter(answer["choices"][0])
        return answer

    return altered


def fewer_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    del choice["logprobs"]["content"][-1]
    return choice


def no_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "logprobs": None}


def foreign_token(choice: dict[str, Any]) -> dict[str, Any]:
    choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = 64
    return choice


def other_tokens(choice: dict[str, Any]) -> dict[str, Any]:
    choice["token_ids"][0] ^= 1
    return choice


def no_number(choice: dict[str, Any]) -> dict[str, Any]:
    choice["logprobs"]["content"][0]["logprob"] = None
    return choice


def impossible(choice: dict[str, Any]) -> dict[str, Any]:
    choice["logprobs"]["content"][0]["logprob"] = -9999.0
    return choice


def likelier_than_certain(choice: dict[str, Any]) -> dict[str, Any]:
    choice["logprobs"]["content"][0]["logprob"] = 0.5
    return choice


def not_a_number(choice: dict[str, Any]) -> dict[str, Any]:
    choice["logprobs"]["content"][0]["logprob"] = float("nan")  # Python writes it, JSON has none
    return choice


def more_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    choice["logprobs"]["content"].append({"token_id": 1, "logprob": -1.0})
    return choice


def too_many(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        **choice, "token_ids": choice["token_ids"] * 2, "logprobs": {"content": choice["logprobs"]["content"] * 2},
        "weight_versions": [{**choice["weight_versions"][0], "end": 2 * len(choice["token_ids"])}],
    }  # fmt: skip


def cut_early(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        **choice, "token_ids": choice["token_ids"][:2], "logprobs": {"content": choice["logprobs"]["content"][:2]},
        "weight_versions": [{**choice["weight_versions"][0], "end": 2}],
    }  # fmt: skip


def gap(choice: dict[str, Any]) -> dict[str, Any]:
    choice["weight_versions"][0]["start"] = 1
    return choice


def ends_oddly(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "finish_reason": "tool_calls"}


def aborts(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "finish_reason": "abort"}


@pytest.mark.parametrize(
    ("alter", "sentence"),
    [
        (vllm(fewer_logprobs), "log-probs must be of the tokens"),
        (vllm(no_logprobs), "one log-prob for each of 6 tokens, it returned 0"),
        (vllm(foreign_token), "ids of the model's 64 tokens, it returned 64"),
        (vllm(other_tokens), "log-probs must be of the tokens"),
        (vllm(no_number), "log-probs must be numbers of at most 0"),
        (vllm(impossible), "log-probs must be numbers of at most 0"),
        (vllm(likelier_than_certain), "log-probs must be numbers of at most 0"),
        (vllm(not_a_number), "the answer must be a token reply"),
        (vllm(more_logprobs), "log-probs must be of the tokens"),
        (lambda answer: {**answer, "choices": answer["choices"] * 2}, "one reply was asked for, 2 came"),
        (vllm(too_many), "must return 1 to 6 tokens, it returned 12"),
        (vllm(cut_early), "cut a reply of at most 6 tokens after 2"),
        (vllm(gap), "weight versions must cover the reply's 6 tokens"),
        (vllm(ends_oddly), "ended with 'tool_calls'"),
        (vllm(aborts), "nobody here asked for that"),
        (lambda answer: {**answer, "choices": []}, "one reply was asked for, 0 came"),
        (lambda answer: {**answer, "model": "other"}, "must answer as base, it answered as other"),
        (lambda answer: {"unexpected": 1}, "the answer must be a token reply"),
    ],
)
async def test_a_reply_that_cannot_be_true_is_refused_with_what_is_wrong(
    tiny: TinyModel, alter: Alter, sentence: str
) -> None:
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        case.fake.alter = alter
        with pytest.raises(EngineError, match=sentence):
            await case.generate()
        case.fake.alter = dict
        assert len(await case.generate()) == 2


async def test_sglang_replies_whose_counts_differ_are_refused(tiny: TinyModel) -> None:
    def short(answer: dict[str, Any]) -> dict[str, Any]:
        del answer["meta_info"]["output_token_logprobs"][-1]
        return answer

    def retokenised(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["prompt_tokens"] += 1
        return answer

    async with serving(tiny, FakeSglang(Backend()), Sglang()) as case:
        case.fake.alter = short
        with pytest.raises(EngineError, match="one log-prob for each of 6 tokens, it returned 5"):
            await case.generate()
        case.fake.alter = retokenised
        with pytest.raises(EngineError, match="fed the 3 tokens of the prompt, it was fed 4"):
            await case.generate()


@pytest.mark.parametrize(("fake", "dialect"), [(FakeVllm, Vllm), (FakeSglang, Sglang)])
async def test_an_update_that_changed_nothing_is_found_out(
    tiny: TinyModel, fake: Callable[[Backend], FakeServer], dialect: Callable[[], Dialect]
) -> None:
    async with serving(tiny, fake(Backend()), dialect()) as case:
        before = await case.generate()
        case.fake.pretends = True
        with pytest.raises(EngineError, match=r"said that it took policy 0\.1, and samples exactly as before"):
            await case.install(V1)
        assert case.engine.installed == V0
        assert case.engine.fault is None
        assert await case.generate() == before
        case.fake.pretends = False
        await case.install(V1)
        assert {c.policy_max for c in await case.generate()} == {V1}


async def test_checkpoints_of_a_worker_that_was_killed_are_cleared_away(tiny: TinyModel) -> None:
    """They are links to snapshots, whose bytes stay on the disk as long as a link does."""
    left = tiny.folder / "engine" / "checkpoints" / "0.7"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"large")
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        await case.install(V1)
        assert [path.name for path in left.parent.iterdir()] == ["0.1"]


async def test_weights_that_are_the_same_may_be_installed_again(tiny: TinyModel) -> None:
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        await case.engine.prefetch(V1, case.tiny.snapshot(case.tiny.fresh(0), V1))
        await case.engine.activate(V1)
        assert {c.policy_min for c in await case.generate()} == {V1}


@pytest.mark.parametrize("fake", [FakeVllm, FakeSglang, lambda backend: FakeVllm(backend, generate=False)])
async def test_a_server_that_was_started_anew_behind_our_back_gets_its_weights_again(
    tiny: TinyModel, fake: Callable[[Backend], FakeServer]
) -> None:
    """It would serve its first weights under the installed policy's tag."""
    made = fake(Backend())
    async with serving(tiny, made, Sglang() if isinstance(made, FakeSglang) else Vllm()) as case:
        before = await case.generate()
        made.backend.load(tiny.folder / "base")
        made.label = "default"
        assert await case.generate() == before
        assert ("server_back", {"server": case.events.noted[-1][1]["server"], "policy": "0.0"}) == case.events.noted[-1]


async def test_weights_that_somebody_else_gave_are_replaced(tiny: TinyModel) -> None:
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        before = await case.generate()
        case.fake.label = "somebody's"
        case.fake.backend.load(tiny.folder / "base")
        assert await case.generate() == before


async def test_a_failing_server_is_asked_again_and_then_told(tiny: TinyModel) -> None:
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        case.fake.status = 503
        with pytest.raises(EngineError, match="answered 503"):
            await case.generate()
        case.fake.status = 200
        assert len(await case.generate()) == 2


async def test_a_busy_server_is_waited_for(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.transport.json_line.FIRST_PAUSE_S", 0.0)
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        case.fake.busy = 5
        assert {c.policy_min for c in await case.generate(n=3)} == {V0}
        assert case.fake.busy == 0


@pytest.mark.parametrize(("fake", "dialect"), [(FakeVllm, Vllm), (FakeSglang, Sglang)])
async def test_a_page_in_place_of_a_reply_or_of_an_update_is_named(
    tiny: TinyModel, fake: Callable[[Backend], FakeServer], dialect: Callable[[], Dialect]
) -> None:
    """A proxy's page, with status 200."""
    async with serving(tiny, fake(Backend()), dialect()) as case:
        case.fake.page = "/"
        with pytest.raises(EngineError, match=r"the answer must be .*<html>"):
            await case.generate()
        case.fake.page = "update"
        with pytest.raises(EngineError, match=r"<html>|must have weights policy-0\.1 after it took them"):
            await case.install(V1)
        assert case.engine.installed == V0
        case.fake.page = ""
        await case.engine.mend()
        assert {c.policy_max for c in await case.generate()} == {V0}


async def test_a_switch_that_failed_half_way_gives_no_reply_under_the_old_name(tiny: TinyModel) -> None:
    """The new weights are in, their name is not, and going back fails: the server calls them by the old name."""
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        before = await case.generate()
        case.fake.page = "update"
        take = case.fake.take

        def taken_once(folder: str) -> None:
            case.fake.take = broken  # type: ignore[method-assign]
            take(folder)

        def broken(folder: str) -> None:
            raise OSError("no space left on device")

        case.fake.take = taken_once  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            await case.install(V1)
        assert case.fake.label == "policy-0.0" and case.engine.installed == V0
        with pytest.raises(EngineError, match="no space left"):
            await case.generate()
        case.fake.page, case.fake.take = "", take  # type: ignore[method-assign]
        await case.engine.mend()
        assert await case.generate() == before


async def test_a_fault_ends_when_the_engine_is_mended_or_weights_are_taken(tiny: TinyModel) -> None:
    """Nobody asks an engine with a fault for replies, so it would stay."""
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        for ends in (case.engine.mend, lambda: case.install(V1)):
            case.fake.status = 500
            case.fake.page = "update"
            case.fake.label = "somebody's"
            with pytest.raises(EngineError):
                await case.generate()
            assert case.engine.fault is not None
            with pytest.raises(EngineError):
                await case.engine.mend()
            assert case.engine.fault is not None
            case.fake.status, case.fake.page = 200, ""
            await ends()
            assert case.engine.fault is None
            assert {c.policy_min for c in await case.generate()} == {case.engine.installed}


async def test_a_server_that_others_give_weights_is_a_fault_soon(tiny: TinyModel) -> None:
    """Two workers at one address would give it their weights for ever."""
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        case.fake.taken_by_others = True
        for _ in range(3):
            with pytest.raises(EngineError):
                await case.generate(n=1)
        assert case.engine.fault is not None and "was begun 3 times and answered nothing" in case.engine.fault
        told = case.events.kinds.count("server_lost")
        with pytest.raises(EngineError):
            await case.generate(n=1)
        assert case.events.kinds.count("server_lost") == told == 3


async def test_a_server_that_hangs_is_named_within_the_deadline(tiny: TinyModel, monkeypatch: Any) -> None:
    monkeypatch.setattr("echo2.rollout.engines.servers.serving.LOOK_S", 0.2)
    async with serving(tiny, FakeVllm(Backend()), Vllm(), request_timeout_s=4.0) as case:
        case.fake.hangs = True
        with pytest.raises(EngineError, match=r"no reply within 4 s"):
            await case.generate()
        case.fake.hangs = False
        assert {c.policy_min for c in await case.generate()} == {V0}


async def test_logprobs_of_a_nucleus_are_none_at_all(tiny: TinyModel) -> None:
    """vLLM's are renormalised over the nucleus (C06), which is not what a record says."""
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        group = await case.generate(sampling=Sampling(1.0, 0.5, 6, 3))
    assert [completion.logprobs for completion in group] == [None, None]
    assert not case.engine.capabilities.top_p_logprobs


async def test_a_server_with_other_logprobs_is_refused_before_it_serves(tiny: TinyModel) -> None:
    fake = FakeVllm(Backend())
    fake.mode = "raw_logprobs"
    with pytest.raises(
        EngineError, match="must run with --logprobs-mode processed_logprobs, this one has raw_logprobs"
    ):
        async with serving(tiny, fake, Vllm()):
            pass


async def test_a_server_that_takes_no_weights_is_not_served_from(tiny: TinyModel) -> None:
    with pytest.raises(EngineError, match=r"takes no weights while it runs: .*VLLM_SERVER_DEV_MODE=1"):
        async with serving(tiny, FakeVllm(Backend(), weights=False), Vllm()):
            pass


async def test_every_sampling_field_is_sent_and_rows_have_seeds_of_their_own(tiny: TinyModel) -> None:
    """E: a model's own generation defaults apply nowhere (PROTOCOL §4)."""
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        case.fake.backend.seen.clear()
        await case.generate(n=4)
    sent = [body["sampling_params"] for body in case.fake.backend.seen]
    assert len({fields["seed"] for fields in sent}) == 4
    assert {json.dumps({**fields, "seed": 0}, sort_keys=True) for fields in sent} == {
        json.dumps(
            {
                "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0, "max_tokens": 6, "min_tokens": 0,
                "stop_token_ids": [], "ignore_eos": True, "logprobs": 0, "detokenize": False,
            },
            sort_keys=True,
        )
    }  # fmt: skip


async def test_an_engine_that_is_closed_fails_what_runs_and_starts_nothing(tiny: TinyModel) -> None:
    async with serving(tiny, FakeVllm(Backend()), Vllm()) as case:
        case.fake.hangs = True
        running = asyncio.ensure_future(case.generate())
        while len(case.fake.backend.seen) < 2:
            await asyncio.sleep(0.01)
        await case.engine.close()
        with pytest.raises(EngineError):
            await running
        with pytest.raises(EngineError, match="must be installed"):
            await case.generate()


async def test_an_adapter_goes_on_top_of_the_full_weights_under_its_own_name(tiny: TinyModel) -> None:
    folder = tiny.folder / "adapter"
    folder.mkdir()
    weights = tiny.snapshot(tiny.fresh(3), V1) / "model.safetensors"
    (folder / "adapter_model.safetensors").write_bytes(weights.read_bytes())
    (folder / "adapter_config.json").write_text("{}")
    described = {"policy": [0, 1], "dtype": "float32", "aliases": {}, "kind": "adapter"}
    (folder / "manifest.json").write_text(json.dumps(described))
    fake = FakeVllm(Backend())
    async with serving(tiny, fake, Vllm()) as case:
        await case.engine.prefetch(V1, folder)
        with pytest.raises(EngineError, match="samples exactly as before"):
            await case.engine.activate(V1)  # the stand-in's adapters change nothing
        assert case.engine.installed == V0
        assert {body["model"] for body in fake.backend.seen} == {"base", "policy-0.1"}
        assert list(fake.adapters) == ["policy-0.1"]
