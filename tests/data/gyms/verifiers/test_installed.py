"""Against the package itself, where it is installed: single turns, several turns, tools, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from echo2.config.sections import TaskSection
from echo2.data.chat import ByteChat
from echo2.data.gyms.gym import GymError
from echo2.data.gyms.verifiers.task import Verifiers
from echo2.data.registry import environment_names, load_task
from echo2.data.task import Message, Score
from echo2.errors import ConfigError
from echo2.rollout.engine import Completion
from echo2.rollout.episode import run_group
from echo2.transport.messages import LeaseGrant
from echo2.types import FinishReason, Policy, Prompt, RowStatus, Sampling, Trajectory

pytest.importorskip("verifiers")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NOW = Policy(0, 0)

SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)


class SumConfig(vf.TasksetConfig):
    count: int = 20


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.count):
            yield SumTask(
                SumData(prompt=f"{i}+{i}?", system_prompt="Numbers only.", answer=str(2 * i)), self.config.task
            )
"""

DIALOGUE = """
import verifiers.v1 as vf

__all__ = ["Guesses", "GuessEnv"]


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.secret):
                segment = await interaction.turn("higher" if int(segment.last_reply) < task.data.secret else "lower")
        interaction.trace.record_reward("found", 1.0 / interaction.trace.num_turns, 1.0)


class Guesses(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        i = 0
        while True:
            yield GuessTask(GuessData(prompt="Guess my number.", secret=i % 7), self.config.task)
            i += 1
"""

TOOLS = '''
import verifiers.v1 as vf

__all__ = ["Shop"]


class Till(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def price(self, item: str) -> str:
        """What an item costs."""
        return str({"tea": 3, "cake": 4}[item])


class ShopData(vf.TaskData):
    answer: str


class ShopTask(vf.Task[ShopData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Till(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        for _ in range(10):
            yield ShopTask(ShopData(prompt="What do tea and cake cost?", answer="7"), self.config.task)


if __name__ == "__main__":
    Till.run()
'''

FAULTS = '''
import asyncio
import time

import aiohttp
import verifiers.v1 as vf

__all__ = ["Faults", "Forgetful"]


class FaultData(vf.TaskData):
    kind: str


class FaultTask(vf.Task[FaultData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def judged(self, task) -> float:
        if task.kind == "raises":
            raise RuntimeError("the judge is ill")
        if task.kind == "blocks":
            time.sleep(600)
        if task.kind == "dies":
            import os
            os._exit(7)
        return float("nan") if task.kind == "nan" else 1.0


class FaultConfig(vf.TasksetConfig):
    kind: str = ""


class Forgetful(vf.Harness[vf.HarnessConfig]):
    """Forgets what was said before the last message."""
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        turns = 2 if data.kind == "forgets" else 1
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as session:
            for turn in range(turns):
                body = {"model": ctx.model, "messages": [{"role": "user", "content": f"turn {turn}"}]}
                async with session.post(f"{endpoint}/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=await answer.text())
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Faults(vf.Taskset[FaultTask, FaultConfig]):
    def load(self):
        for _ in range(10):
            yield FaultTask(FaultData(prompt="Go.", kind=self.config.kind), self.config.task)
'''


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("packages")
    for name, text in (("sums", SUMS), ("dialogue", DIALOGUE), ("shop_tools", TOOLS), ("faults", FAULTS)):
        (folder / f"vf_test_{name}.py").write_text(text)
    for name, needs in (("vf-test-sums", "verifiers>=0.4"), ("vf-test-shop-tools", "requests")):
        facts = folder / f"{name.replace('-', '_')}-1.0.dist-info" / "METADATA"
        facts.parent.mkdir()
        facts.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def task_of(name: str, **options: object) -> Verifiers:
    task = load_task(TaskSection(name=f"verifiers/vf-test-{name}", options=options))
    assert isinstance(task, Verifiers)
    return task


class Replies:
    """A talk that says what it is told to, and remembers what it heard."""

    position = 0

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.heard: list[list[Message]] = []

    async def say(self, messages: Sequence[Message]) -> str:
        self.heard.append(list(messages))
        return self._replies.pop(0)

    def recite(self, messages: Sequence[Message], reply: str) -> None:
        raise AssertionError("nothing is recited")


@pytest.mark.usefixtures("packages")
async def test_a_single_turn_is_judged_by_the_environments_weighted_rewards() -> None:
    task = task_of("sums", args={"count": 30})
    prompt = task.prompt("train", 4)
    talk = Replies("8")

    episode = await task.rollout(prompt, talk)

    assert talk.heard == [task.messages(prompt)]
    assert talk.heard[0] == [{"role": "system", "content": "Numbers only."}, {"role": "user", "content": "4+4?"}]
    assert episode.score.reward == 2.5
    assert episode.omega == {
        "rewards": {"right": 1.0, "short": 1.0},
        "weights": {"right": 2.0, "short": 0.5},
        "metrics": {"length": 1.0},
        "turns": 1,
    }
    assert await asyncio.to_thread(task.score, prompt, "nine and more") == Score(0.0, episode.score.status)


@pytest.mark.usefixtures("packages")
def test_prompts_repeat_and_held_out_ones_are_others() -> None:
    task = task_of("sums")
    prompts = {split: [task.prompt(split, i) for i in range(task.size(split) or 0)] for split in ("train", "eval")}

    assert (len(prompts["train"]), len(prompts["eval"])) == (18, 2)
    rows = [prompt.content["task"]["idx"] for some in prompts.values() for prompt in some]
    assert sorted(rows) == list(range(20))
    assert task.prompt("train", 7) == prompts["train"][7]
    assert task_of("dialogue").size("train") is None


@pytest.mark.usefixtures("packages")
def test_installed_packages_that_export_tasks_are_listed_beside_those_of_the_library() -> None:
    names = environment_names("verifiers")

    assert {"verifiers/textarena", "verifiers/vf-test-sums"} <= set(names)
    assert "verifiers/vf-test-shop-tools" not in names


class ByteEngine:
    """Says one reply after the other, as bytes."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.prompts: list[list[int]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, n: int) -> list[Completion]:
        self.prompts.append(list(token_ids))
        reply = (*self._replies.pop(0).encode(), ByteChat.END)
        return [Completion(reply, None, NOW, NOW, FinishReason.STOP)]


def grant(prompt: Prompt, timeout_s: float = 120.0) -> LeaseGrant:
    return LeaseGrant(
        lease_id="lease",
        group_id=0,
        attempt=0,
        prompt=prompt,
        indices=(0,),
        sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=64, seed=0),
        policy=NOW,
        timeout_s=timeout_s,
    )


class Clock:
    def monotonic(self) -> float:
        return 0.0


@pytest.mark.usefixtures("packages")
async def test_every_turn_extends_the_last_one_token_by_token_and_only_the_policys_words_bear_loss() -> None:
    task = task_of("dialogue")
    prompt = task.prompt("train", 3)
    engine = ByteEngine("1", "6", "3")

    (row,) = await run_group(engine, task, ByteChat(), grant(prompt), False, Clock())  # type: ignore[arg-type]

    assert row.status is RowStatus.FINISHED, row.error
    record = msgspec.msgpack.decode(row.record, type=Trajectory)
    assert record.reward == pytest.approx(1 / 3)
    first, second, third = engine.prompts
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert [ByteChat().decode(segment.tokens.tolist()) for segment in record.segments if segment.sampled] == [
        "1",
        "6",
        "3",
    ]
    assert "higher" in ByteChat().decode(second[len(first) :])
    assert "lower" in ByteChat().decode(third[len(second) :])
    assert record.omega["turns"] == 3


@pytest.mark.usefixtures("packages")
async def test_tools_are_called_by_the_policy_and_their_results_come_back() -> None:
    task = task_of("shop-tools")
    calls = "".join(
        f'<tool_call>{{"name": "till_price", "arguments": {{"item": "{item}"}}}}</tool_call>'
        for item in ("tea", "cake")
    )
    talk = Replies(f"Let me ask. {calls}", "7")

    episode = await task.rollout(task.prompt("train", 0), talk)

    assert episode.score.reward == 1.0, talk.heard
    assert "till_price" in talk.heard[0][0]["content"]
    assert talk.heard[1] == [
        {"role": "user", "content": "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"}
    ]


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("kind", "words"),
    [("raises", "the judge is ill"), ("forgets", "rewrites history"), ("dies", "its process ended")],
)
async def test_what_goes_wrong_is_no_reward(kind: str, words: str) -> None:
    task = task_of("faults", args={"kind": kind})

    with pytest.raises(GymError, match=words):
        await task.rollout(task.prompt("train", 0), Replies("a", "b"))


@pytest.mark.usefixtures("packages")
async def test_an_environment_that_blocks_costs_its_episode_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.data.gyms.verifiers.library.OBEY_S", 0.5)
    task = task_of("faults", args={"kind": "blocks"})
    prompt = task.prompt("train", 0)

    (row,) = await run_group(ByteEngine("a"), task, ByteChat(), grant(prompt, 8.0), False, Clock())  # type: ignore[arg-type]

    assert row.status is RowStatus.TIMEOUT
    await asyncio.sleep(1.0)
    assert task.prompt("train", 0) == prompt  # in a new process


@pytest.mark.usefixtures("packages")
def test_a_reply_alone_is_no_dialogue() -> None:
    task = task_of("dialogue")

    with pytest.raises(GymError, match="takes several turns"):
        task.score(task.prompt("train", 3), "1")


@pytest.mark.usefixtures("packages")
def test_wrong_names_and_options_are_the_users_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"no environment 'vf-test-nothing' here.*install its package"):
        task_of("nothing")
    with pytest.raises(ConfigError, match=r"vf-test-sums must open with its args and settings.*count"):
        task_of("sums", args={"count": "many"})
    with pytest.raises(ConfigError, match="the policy must play one agent, of assistant, user 2 have no model"):
        task_of("sums", settings={"id": "user-sim"})
