"""What every engine must do, as tests: one suite, run by each engine's own test file.

A test file says what is under test and inherits the tests:

    class TestMine(EngineConformance):
        @pytest.fixture
        def subject(self, …) -> Subject: …

A ``Subject`` is a factory of engines with two policies' snapshots and a way to know the right log-probs. It may outlive
tests (class or module scope) and keep a server running; engines are opened anew for each test. A test that asks for a
capability which the engine does not declare is skipped with that capability's name; what an engine cannot do and has no
capability for is named in ``lacks``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from echo2.errors import EngineError
from echo2.rollout.engine import ActivationMode, Completion, Engine
from echo2.types import FinishReason, Policy, Sampling

V0, V1 = Policy(0, 0), Policy(0, 1)


class Subject:
    """One kind of engine under test. Subclass it and give it values."""

    snapshots: Mapping[Policy, Path]
    """Verified snapshot folders of V0 and V1, whose weights differ much."""
    prompts: Sequence[Sequence[int]]
    """At least three, of different lengths, all under half the context."""
    vocabulary: int
    context: int
    """Tokens that prompt and reply may have together."""
    never: int = 2**31 - 2
    """A stop token that the model never samples; so a reply's length is its limit."""
    tolerance: float = 1e-3
    """Largest |log-prob - reference| in nats; say where it comes from when it is raised (a bfloat16 server: 5e-2)."""
    long_tokens: int = 40
    """Length of the generation that a switch interrupts; it must last longer than one of three tokens."""
    lacks: Mapping[str, str] = MappingProxyType({})
    """Name of a test -> why this engine cannot pass it."""

    def open(self) -> AbstractAsyncContextManager[Engine]:
        """An engine that has nothing of another test in it; installed or not."""
        raise NotImplementedError

    def reference(
        self, policy: Policy, prompt: Sequence[int], reply: Sequence[int], temperature: float
    ) -> Sequence[float] | None:
        """[L] log-softmax of logits / temperature over the whole vocabulary, from one forward pass; None if unknown."""
        raise NotImplementedError

    def sampling(self, **changes: Any) -> Sampling:
        settled = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 10, "seed": 3, "stop_token_ids": (self.never,)}
        return Sampling(**{**settled, **changes})


@asynccontextmanager
async def serving(subject: Subject, policy: Policy = V0) -> AsyncIterator[Engine]:
    async with subject.open() as engine:
        if engine.installed != policy:
            await _install(engine, policy, subject.snapshots[policy])
        yield engine


async def _install(engine: Engine, policy: Policy, folder: Path) -> None:
    await engine.prefetch(policy, folder)
    await engine.activate(policy)


def tokens(group: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in group]


def assert_true_logprobs(
    subject: Subject, prompt: Sequence[int], completion: Completion, temperature: float, versions: Sequence[int] = ()
) -> None:
    """Every token's log-prob is the one of the version that sampled it."""
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    whose = versions or completion.versions or [completion.policy_min.version] * len(completion.token_ids)
    for policy in (V0, V1):
        if policy.version not in whose:
            continue
        expected = subject.reference(policy, prompt, completion.token_ids, temperature)
        if expected is None:
            return
        for got, right, version in zip(completion.logprobs, expected, whose, strict=True):
            assert version != policy.version or got == pytest.approx(right, abs=subject.tolerance)


class EngineConformance:
    """Inherit it in a class whose name begins with Test, beside a fixture ``subject``."""

    @pytest.fixture(autouse=True)
    def _named_gaps(self, request: pytest.FixtureRequest, subject: Subject) -> None:
        name = request.node.originalname
        if name in subject.lacks:
            pytest.skip(f"{name}: {subject.lacks[name]}")

    # ---- installs ----------------------------------------------------------------------------------------------

    async def test_nothing_runs_before_an_install_and_only_what_was_prefetched_is_installed(
        self, subject: Subject
    ) -> None:
        """E11"""
        async with subject.open() as engine:
            assert engine.installed is None
            with pytest.raises(EngineError, match="must be installed"):
                await engine.generate(subject.prompts[0], subject.sampling(), 1)
            with pytest.raises(EngineError, match="must be prefetched"):
                await engine.activate(V0)
            assert engine.installed is None

    async def test_an_install_changes_the_policy_and_its_replies_and_only_then(self, subject: Subject) -> None:
        prompt = subject.prompts[0]
        async with serving(subject) as engine:
            old = await engine.generate(prompt, subject.sampling(), 4)
            await engine.prefetch(V1, subject.snapshots[V1])
            assert engine.installed == V0
            beside = await engine.generate(prompt, subject.sampling(), 4)
            await engine.activate(V1)
            assert engine.installed == V1
            new = await engine.generate(prompt, subject.sampling(), 4)
            if engine.capabilities.logprobs:
                for completion in [*old, *beside, *new]:
                    assert_true_logprobs(subject, prompt, completion, 1.0)
        assert {(c.policy_min, c.policy_max) for c in [*old, *beside]} == {(V0, V0)}
        assert {(c.policy_min, c.policy_max) for c in new} == {(V1, V1)}
        assert tokens(new) != tokens(old)

    @pytest.mark.parametrize("fault", ["cut short", "garbled", "tensor missing", "another policy", "nothing there"])
    async def test_a_spoilt_snapshot_leaves_the_old_version_serving(
        self, subject: Subject, fault: str, tmp_path: Path
    ) -> None:
        spoilt = _spoilt(subject.snapshots[V1], tmp_path / "spoilt", fault)
        prompt = subject.prompts[0]
        async with serving(subject) as engine:
            before = await engine.generate(prompt, subject.sampling(), 2)
            with pytest.raises(EngineError):
                await _install(engine, V1, spoilt)
            assert engine.installed == V0
            assert engine.fault is None
            after = await engine.generate(prompt, subject.sampling(), 2)
            assert {(c.policy_min, c.policy_max) for c in after} == {(V0, V0)}
            if engine.capabilities.seeded:
                assert tokens(after) == tokens(before)
            await _install(engine, V1, subject.snapshots[V1])  # a whole one still goes in
            assert engine.installed == V1

    async def test_activating_what_is_installed_changes_nothing(self, subject: Subject) -> None:
        async with serving(subject) as engine:
            await engine.activate(V0)
            assert engine.installed == V0

    # ---- tokens ------------------------------------------------------------------------------------------------

    async def test_the_same_seed_gives_the_same_tokens(self, subject: Subject) -> None:
        async with serving(subject) as engine:
            _needs(engine.capabilities.seeded, "seeded")
            first, again = [await engine.generate(subject.prompts[0], subject.sampling(), 4) for _ in range(2)]
            other = await engine.generate(subject.prompts[0], subject.sampling(seed=4), 4)
        assert tokens(first) == tokens(again)
        assert tokens(first) != tokens(other)
        assert len(set(tokens(first))) > 1

    async def test_the_same_seed_gives_the_same_tokens_whatever_else_is_generated(self, subject: Subject) -> None:
        orders = [
            (prompt, subject.sampling(seed=i, temperature=0.7 + 0.2 * i, max_new_tokens=4 + 3 * i), 1 + i)
            for i, prompt in enumerate(subject.prompts)
        ]
        async with serving(subject) as engine:
            _needs(engine.capabilities.seeded, "seeded")
            together = await asyncio.gather(*(engine.generate(*order) for order in orders))
            alone = [await engine.generate(*order) for order in orders]
        assert [tokens(group) for group in together] == [tokens(group) for group in alone]
        assert [len(group) for group in together] == [n for _, _, n in orders]

    async def test_groups_that_overlap_keep_their_own_temperatures_and_lengths(self, subject: Subject) -> None:
        """B11"""
        orders = [
            (prompt, subject.sampling(seed=i, temperature=0.6 + 0.3 * i, max_new_tokens=3 + 5 * i), 2)
            for i, prompt in enumerate(subject.prompts)
        ]
        async with serving(subject) as engine:
            groups = await asyncio.gather(*(engine.generate(*order) for order in orders))
            has_logprobs = engine.capabilities.logprobs
        for (prompt, sampling, n), group in zip(orders, groups, strict=True):
            assert len(group) == n
            for completion in group:
                assert len(completion.token_ids) <= sampling.max_new_tokens
                if has_logprobs:
                    assert_true_logprobs(subject, prompt, completion, sampling.temperature)

    async def test_a_sampled_stop_token_is_kept_and_none_is_added(self, subject: Subject) -> None:
        """B07"""
        async with serving(subject) as engine:
            stops = tuple(range(0, subject.vocabulary, 6))
            sampling = subject.sampling(stop_token_ids=stops, max_new_tokens=8)
            group = await engine.generate(subject.prompts[0], sampling, 16)
        assert FinishReason.STOP in {completion.finish_reason for completion in group}
        for completion in group:
            stopped = completion.finish_reason is FinishReason.STOP
            assert [token in stops for token in completion.token_ids].count(True) == int(stopped)
            assert (completion.token_ids[-1] in stops) == stopped
            assert len(completion.token_ids) == 8 or stopped

    async def test_the_token_limit_cuts_and_says_so(self, subject: Subject) -> None:
        async with serving(subject) as engine:
            for limit in (1, 7):
                (completion,) = await engine.generate(subject.prompts[0], subject.sampling(max_new_tokens=limit), 1)
                assert (len(completion.token_ids), completion.finish_reason) == (limit, FinishReason.LENGTH)

    async def test_a_reply_ends_where_the_context_ends(self, subject: Subject) -> None:
        prompt = [subject.prompts[0][0]] * (subject.context - 4)
        async with serving(subject) as engine:
            (completion,) = await engine.generate(prompt, subject.sampling(max_new_tokens=50), 1)
        assert 1 <= len(completion.token_ids) <= 4
        assert completion.finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize("length", ["empty", "as long as the context", "longer than the context"])
    async def test_a_prompt_that_cannot_be_answered_is_an_engine_error(self, subject: Subject, length: str) -> None:
        prompt = subject.prompts[0]
        sizes = {"empty": 0, "as long as the context": subject.context, "longer than the context": subject.context + 9}
        async with serving(subject) as engine:
            with pytest.raises(EngineError):
                await engine.generate([prompt[0]] * sizes[length], subject.sampling(), 2)
            assert len(await engine.generate(prompt, subject.sampling(), 2)) == 2

    async def test_each_reply_is_heard_once_as_it_is_returned(self, subject: Subject) -> None:
        heard: list[tuple[int, Completion]] = []
        stops = tuple(range(0, subject.vocabulary, 6))
        async with serving(subject) as engine:
            sampling = subject.sampling(stop_token_ids=stops, max_new_tokens=8)
            group = await engine.generate(
                subject.prompts[0], sampling, 6, lambda position, reply: heard.append((position, reply))
            )
        assert sorted(heard, key=lambda pair: pair[0]) == list(enumerate(group))

    # ---- log-probs ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
    async def test_logprobs_are_those_of_a_reference_pass_at_the_temperature(
        self, subject: Subject, temperature: float
    ) -> None:
        """C06, E01: right log-probs also prove that tied and untied weights arrived."""
        async with serving(subject) as engine:
            _needs(engine.capabilities.logprobs, "logprobs")
            for prompt in subject.prompts:
                for completion in await engine.generate(prompt, subject.sampling(temperature=temperature), 3):
                    assert_true_logprobs(subject, prompt, completion, temperature)

    async def test_top_p_samples_from_the_nucleus_and_reports_full_logprobs(self, subject: Subject) -> None:
        prompt = subject.prompts[0]
        async with serving(subject) as engine:
            _needs(engine.capabilities.logprobs, "logprobs")
            _needs(engine.capabilities.top_p_logprobs, "top_p_logprobs")
            greedy = await engine.generate(prompt, subject.sampling(top_p=1e-6), 3)
            group = await engine.generate(prompt, subject.sampling(top_p=0.5), 4)
            cool = await engine.generate(prompt, subject.sampling(top_p=0.8, temperature=0.6), 4)
        assert len(set(tokens(greedy))) == 1
        for completion in [*greedy, *group]:
            assert_true_logprobs(subject, prompt, completion, 1.0)
        for completion in cool:
            assert_true_logprobs(subject, prompt, completion, 0.6)

    # ---- a switch under way ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", list(ActivationMode))
    async def test_a_switch_under_way_does_what_its_mode_says_and_tags_are_true(
        self, subject: Subject, mode: ActivationMode
    ) -> None:
        """I5"""
        async with serving(subject) as engine:
            _needs(mode in engine.capabilities.modes, f"modes: {mode}")
            await engine.prefetch(V1, subject.snapshots[V1])
            ended = await _switched_under_way(subject, engine, mode)
            assert engine.installed == V1
            capabilities = engine.capabilities
            after = await engine.generate(subject.prompts[0], subject.sampling(), 1)
        assert (after[0].policy_min, after[0].policy_max) == (V1, V1)
        if mode is ActivationMode.ABORT:
            assert isinstance(ended, EngineError)
            assert str(ended).startswith("aborted")
            return
        assert isinstance(ended, list), ended
        newest = V0 if mode is ActivationMode.DRAIN else V1
        for completion in ended:
            assert (completion.policy_min, completion.policy_max) == (V0, newest)
            versions = completion.versions or (0,) * len(completion.token_ids)
            assert list(versions) == sorted(versions)
            assert set(versions) == {0, newest.version}
            if capabilities.logprobs and (newest == V0 or capabilities.fresh_caches):
                assert_true_logprobs(subject, subject.prompts[0], completion, 1.0)

    async def test_a_cancelled_call_leaves_the_others_alone(self, subject: Subject) -> None:
        async with serving(subject) as engine:
            doomed = asyncio.ensure_future(_long(subject, engine))
            await asyncio.sleep(0)  # it asks first
            await _short(subject, engine)
            other = asyncio.ensure_future(engine.generate(subject.prompts[1], subject.sampling(), 2))
            doomed.cancel()
            assert len(await other) == 2
            await asyncio.gather(doomed, return_exceptions=True)
            assert len(await engine.generate(subject.prompts[2], subject.sampling(), 2)) == 2


def _needs(declared: bool, capability: str) -> None:
    if not declared:
        pytest.skip(f"the engine declares that it lacks: {capability}")


async def _long(subject: Subject, engine: Engine) -> list[Completion]:
    return await engine.generate(subject.prompts[0], subject.sampling(max_new_tokens=subject.long_tokens), 3)


async def _short(subject: Subject, engine: Engine) -> list[Completion]:
    """Three tokens beside a long generation that was asked for first: when they are there, that one is under way."""
    return await engine.generate(subject.prompts[1], subject.sampling(max_new_tokens=3), 1)


async def _switched_under_way(
    subject: Subject, engine: Engine, mode: ActivationMode
) -> list[Completion] | BaseException:
    running = asyncio.ensure_future(_long(subject, engine))
    await asyncio.sleep(0)  # it asks first
    await _short(subject, engine)
    assert not running.done(), "the long generation must outlast the short one; raise long_tokens"
    await engine.activate(V1, mode)
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    return ended


def _spoilt(whole: Path, folder: Path, fault: str) -> Path:
    if fault == "nothing there":
        return folder
    shutil.copytree(whole, folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if fault == "cut short":
        weights.write_bytes(content[: len(content) * 2 // 3])
    elif fault == "garbled":
        weights.write_bytes(b"\xff" * 64 + content[64:])
    elif fault == "tensor missing":
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        gone = sorted(name for name in header if name != "__metadata__")[-1]
        header[f"not.{gone}"] = header.pop(gone)
        renamed = json.dumps(header).encode()
        weights.write_bytes(len(renamed).to_bytes(8, "little") + renamed + content[8 + size :])
    else:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        manifest["policy"] = [0, 7]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
