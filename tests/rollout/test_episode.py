from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from echo2.config.sections import TaskSection
from echo2.data.admission import Asked, parse_record
from echo2.data.chat import ByteChat
from echo2.data.registry import load_task
from echo2.data.task import Episode, Message, Score, Split, Talk, Task
from echo2.errors import EngineError
from echo2.rollout.apart import judged_apart
from echo2.rollout.engine import ActivationMode, Capabilities, Completion, Heard
from echo2.rollout.episode import run_group
from echo2.transport.messages import LeaseGrant, RowSubmission
from echo2.types import FinishReason, Policy, Prompt, RowStatus, Sampling, Trajectory

CHAT = ByteChat()
NOW, NEXT = Policy(0, 4), Policy(0, 5)


class StubClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def wall(self) -> float:
        return 0.0


class StubEngine:
    """Answers with given completions, in order, and keeps what it was fed."""

    installed: Policy | None = NOW
    capabilities = Capabilities(logprobs=True, token_in=True, modes=frozenset(ActivationMode))

    def __init__(self, *completions: Completion | Exception | float) -> None:
        self._next = list(completions)
        self.fed: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        self.fed.append(list(token_ids))
        self.samplings.append(sampling)
        taken, self._next = self._next[:n], self._next[n:]
        completions = []
        for item in taken:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, float):
                await asyncio.Event().wait()
                raise AssertionError
            completions.append(item)
            if heard is not None:
                heard(len(completions) - 1, item)
        return completions


def said(text: str, *, finish: FinishReason = FinishReason.STOP, **changes: Any) -> Completion:
    token_ids = tuple(CHAT.encode_reply(text) if finish is FinishReason.STOP else text.encode())
    logprobs = tuple(-0.25 * (i + 1) for i in range(len(token_ids)))
    return msgspec.structs.replace(Completion(token_ids, logprobs, NOW, NOW, finish), **changes)


class Greeting(Task):
    """Asks for `hi`; `boom` cannot be scored, `nan` scores no number."""

    name = "greeting"

    def size(self, split: Split) -> int | None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(f"greeting/{index}", self.name, {})

    def messages(self, prompt: Prompt) -> list[Message]:
        return [{"role": "user", "content": "say hi"}]

    def score(self, prompt: Prompt, reply: str) -> Score:
        if reply == "boom":
            raise ZeroDivisionError("no score")
        return Score(math.nan if reply == "nan" else float(reply == "hi"), "judged")

    def metadata(self, prompt: Prompt, reply: str) -> dict[str, Any]:
        return {"letters": len(reply)}


class TwoTurns(Greeting):
    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        first = await talk.say(self.messages(prompt))
        second = await talk.say([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
        return Episode(Score(float(first == second), "met"), {"turns": 2})


def lease(*indices: int, timeout_s: float = 5.0, **changes: Any) -> LeaseGrant:
    sampling = Sampling(0.7, 1.0, 16, 11)
    grant = LeaseGrant(
        "lease-1", 7, 1, Prompt("greeting/0", "greeting", {}), indices, sampling, NOW, timeout_s, "train"
    )
    return msgspec.structs.replace(grant, **changes)


async def run(engine: StubEngine, task: Task, grant: LeaseGrant) -> tuple[RowSubmission, ...]:
    return await run_group(engine, task, CHAT, grant, False, StubClock())  # type: ignore[arg-type]


def record(row: RowSubmission) -> Trajectory:
    assert row.status is RowStatus.FINISHED, row.error
    return msgspec.msgpack.decode(row.record, type=Trajectory)


async def test_a_record_holds_what_was_fed_and_sampled() -> None:
    engine = StubEngine(said("hi"), said("ho", finish=FinishReason.LENGTH))
    rows = await run(engine, Greeting(), lease(2, 5))
    first, second = map(record, rows)
    assert [row.index for row in rows] == [2, 5]
    assert [segment.tokens.tolist() for segment in first.segments] == [engine.fed[0], CHAT.encode_reply("hi")]
    assert [segment.sampled for segment in first.segments] == [False, True]
    assert first.segments[1].logprob_values is not None
    assert first.segments[1].logprob_values.tolist() == [-0.25, -0.5, -0.75]
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert second.segments[1].tokens.tolist() == list(b"ho")
    assert (first.temperature, first.logprob_convention) == (0.7, "full-vocab@temperature")
    assert first.omega == {"letters": 2, "status": "judged", "episode_s": 1.0}
    assert (first.policy_min, first.policy_max, first.normalisation_key) == (NOW, NOW, None)
    assert engine.samplings[0].stop_token_ids == (CHAT.END,)


async def test_ids_that_no_text_encodes_to_reach_the_record_unchanged() -> None:
    """B10"""
    odd = (0xFF, 0xC3, 0x28, CHAT.END)
    engine = StubEngine(Completion(odd, (-1.0,) * 4, NOW, NOW, FinishReason.STOP))
    (row,) = await run(engine, Greeting(), lease(0))
    assert record(row).segments[1].tokens.tolist() == list(odd)


async def test_a_span_of_versions_and_missing_logprobs_are_told() -> None:
    spanning = said("hi", policy_max=NEXT, versions=(4, 4, 5), logprobs=None)
    trajectory = record((await run(StubEngine(spanning), Greeting(), lease(0)))[0])
    assert (trajectory.policy_min, trajectory.policy_max) == (NOW, NEXT)
    assert trajectory.segments[1].versions is not None
    assert trajectory.segments[1].logprobs is None
    assert trajectory.logprob_convention is None


async def test_turns_of_different_versions_say_which_sampled_each_token() -> None:
    """A switch between two turns: each has one version, the record has two."""
    later = said("hi", policy_min=NEXT, policy_max=NEXT)
    trajectory = record((await run(StubEngine(said("hi"), later), TwoTurns(), lease(0)))[0])
    assert (trajectory.policy_min, trajectory.policy_max) == (NOW, NEXT)
    told = [segment.version_values for segment in trajectory.segments]
    assert [None if one is None else set(one.tolist()) for one in told] == [None, {NOW.version}, None, {NEXT.version}]
    leased = lease(0)
    asked = Asked(leased.sampling.temperature, leased.sampling.top_p)
    assert parse_record(msgspec.msgpack.encode(trajectory), leased.prompt, asked) == trajectory


async def test_a_reply_that_cannot_be_scored_fails_its_own_row_only() -> None:
    """I4"""
    rows = await run(StubEngine(said("boom"), said("nan"), said("hi")), Greeting(), lease(0, 1, 2))
    assert [row.status for row in rows] == [RowStatus.ERROR, RowStatus.ERROR, RowStatus.FINISHED]
    assert rows[0].error == "ZeroDivisionError: no score"
    assert "reward must be finite" in rows[1].error


@pytest.mark.parametrize(
    ("trouble", "status", "words"),
    [
        (EngineError("a prompt must have 1 to 63 tokens"), RowStatus.ERROR, "a prompt must have 1 to 63 tokens"),
        (EngineError("aborted: policy 0.5 was activated"), RowStatus.ABORTED, "aborted"),
        (RuntimeError("x" * 1000), RowStatus.ERROR, "RuntimeError: xxx"),
        (said("hi", logprobs=(-1.0,)), RowStatus.ERROR, "one log-prob per token"),
        (said("hi", token_ids=(), logprobs=()), RowStatus.ERROR, "at least one token"),
    ],
)
@pytest.mark.parametrize("task", [Greeting(), TwoTurns()], ids=["one-turn", "two-turns"])
async def test_what_goes_wrong_in_the_engine_is_a_status(
    trouble: Exception | Completion, status: RowStatus, words: str, task: Task
) -> None:
    (row,) = await run(StubEngine(trouble), task, lease(3))
    assert (row.index, row.status) == (3, status)
    assert row.error.startswith(words) or words in row.error
    assert len(row.error) <= 300


class Ending(Greeting):
    """Its score of a word does what the word says."""

    def score(self, prompt: Prompt, reply: str) -> Score:
        ways: dict[str, Any] = {
            "exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "generator": GeneratorExit(),
            "text": Score("1.0", "x"), "true": Score(True, "x"), "none": None, "number": 1.0,  # type: ignore[arg-type]
        }  # fmt: skip
        way = ways.get(reply, Score(1.0, "fine"))
        if isinstance(way, BaseException):
            raise way
        return way  # type: ignore[no-any-return]


async def test_a_score_that_would_end_the_program_or_is_none_fails_its_own_row_only() -> None:
    words = ["exit", "interrupt", "generator", "text", "true", "none", "number", "hi"]
    engine = StubEngine(*map(said, words))
    rows = await run_group(
        engine, Ending(), CHAT, lease(*range(8), timeout_s=60.0), False, StubClock(), judged_apart  # type: ignore[arg-type]
    )  # fmt: skip
    assert [row.status for row in rows] == [RowStatus.ERROR] * 7 + [RowStatus.FINISHED]
    told = (
        "SystemExit: 3",
        "KeyboardInterrupt",
        "GeneratorExit",
        "got str '1.0'",
        "got bool True",
        "None",
        "float 1.0",
    )
    for row, words_of in zip(rows, told, strict=False):
        assert words_of in row.error


class Leaving(Greeting):
    """Wants to end the program in the middle of an episode."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        await talk.say(self.messages(prompt))
        raise self.error


class JudgesAndLeaves(Greeting):
    async def judge(self, prompt: Prompt, reply: str) -> Score:
        raise SystemExit(4)


@pytest.mark.parametrize("task", [Leaving(SystemExit(4)), Leaving(KeyboardInterrupt()), JudgesAndLeaves()])
async def test_an_episode_may_not_end_the_program(task: Task) -> None:
    rows = await run(StubEngine(said("hi"), said("hi")), task, lease(0, 1))
    assert [row.status for row in rows] == [RowStatus.ERROR] * 2
    assert "a task must not end the program, it raised " in rows[0].error


class Nothing(Greeting):
    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        await talk.say(self.messages(prompt))
        return None  # type: ignore[return-value]


class Speechless(Greeting):
    def messages(self, prompt: Prompt) -> list[Message]:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Nothing(), "an episode must end in an Episode, got None"),
        (Speechless(), "must give the messages of greeting/0 as a list"),
    ],
)
async def test_an_episode_of_the_wrong_kind_is_named(task: Task, words: str) -> None:
    (row,) = await run(StubEngine(said("hi")), task, lease(0))
    assert row.status is RowStatus.ERROR and words in row.error


class Hanging(Greeting):
    """Its score of `stay` does not come back until the test says so."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def score(self, prompt: Prompt, reply: str) -> Score:
        if reply == "stay":
            self.released.wait()
        return super().score(prompt, reply)


async def test_a_score_that_hangs_times_its_own_row_out_and_holds_up_nothing_else() -> None:
    task = Hanging()
    engine = StubEngine(said("stay"), said("hi"), said("boom"))
    rows = await run_group(
        engine, task, CHAT, lease(0, 1, 2, timeout_s=0.5), False, StubClock(), judged_apart  # type: ignore[arg-type]
    )  # fmt: skip
    task.released.set()
    assert [row.status for row in rows] == [RowStatus.TIMEOUT, RowStatus.FINISHED, RowStatus.ERROR]
    assert rows[0].error == "no result within 0.5 s"
    assert rows[2].error == "ZeroDivisionError: no score"


class JudgesItself(Greeting):
    """Its replies are judged in the order of their length, shortest first, whatever came first."""

    def __init__(self) -> None:
        self.order: list[str] = []

    async def judge(self, prompt: Prompt, reply: str) -> Score:
        for _ in range(len(reply)):
            await asyncio.sleep(0)
        self.order.append(reply)
        return self.score(prompt, reply)


async def test_replies_of_a_group_are_judged_side_by_side() -> None:
    task = JudgesItself()
    rows = await run(StubEngine(said("a very long reply"), said("hi")), task, lease(0, 1))
    assert task.order == ["hi", "a very long reply"]
    assert [record(row).reward for row in rows] == [0.0, 1.0]


@pytest.mark.parametrize("task", [Greeting(), TwoTurns()], ids=["one-turn", "two-turns"])
async def test_an_episode_that_does_not_end_is_a_timeout(task: Task) -> None:
    rows = await run(StubEngine(1.0, 1.0), task, lease(0, 1, timeout_s=0.01))
    assert {row.status for row in rows} == {RowStatus.TIMEOUT}
    assert rows[0].error == "no result within 0.01 s"


async def test_a_second_turn_extends_the_first_exactly() -> None:
    """B03, B05: ids are appended, consecutive messages are rendered as one."""
    engine = StubEngine(said("<think>R1</think>A1"), said("no end", finish=FinishReason.LENGTH))
    trajectory = record((await run(engine, TwoTurns(), lease(0)))[0])
    first, second = engine.fed
    reply = CHAT.encode_reply("<think>R1</think>A1")
    news: list[Message] = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert second == first + reply + CHAT.render(news, thinking=False)
    whole = [token for segment in trajectory.segments for token in segment.tokens.tolist()]
    assert whole == [*second, *b"no end"]
    assert [segment.sampled for segment in trajectory.segments] == [False, True, False, True]
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.omega["turns"] == 2
    assert engine.samplings[0].seed != engine.samplings[1].seed


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "gold", "reply"),
    [
        ("arithmetic", "5", "It is 5."),
        ("maths", "5", r"Answer: \boxed{5}"),
        ("maths", r"\sqrt{8}", r"So it is \boxed{2\sqrt{2}}."),
        ("aime24", "073", "Answer: 73"),
    ],
)
async def test_a_right_reply_scores_one_from_prompt_to_record(name: str, gold: str, reply: str) -> None:
    """A16 (b): a stub policy that answers correctly has mean reward 1."""
    task = load_task(TaskSection(name=name))
    prompt = task.prompt_for_gold(gold)
    rows = await run(StubEngine(*[said(reply)] * 4), task, lease(0, 1, 2, 3, prompt=prompt, timeout_s=200.0))
    assert [record(row).reward for row in rows] == [1.0] * 4
