"""One reply gets one score, whoever grades it: by hand, a worker, the coordinator, an evaluation, a Python program."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from echo2.config.load import build_config
from echo2.config.sections import TaskSection
from echo2.coordinator.scoring import ScoringProcess
from echo2.data.chat import ByteChat
from echo2.data.registry import load_task
from echo2.data.task import Task
from echo2.rollout.apart import judged_apart
from echo2.rollout.engine import ActivationMode, Capabilities, Completion, Heard
from echo2.rollout.episode import run_group
from echo2.run.folder import RunFolder
from echo2.shell import SystemClock
from echo2.transport.messages import LeaseGrant
from echo2.types import FinishReason, Policy, RowStatus, Sampling, Trajectory, pack_tokens

from .conftest import Echo2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CHAT, NOW = ByteChat(), Policy(0, 0)
GOLD = "7"

WRITTEN = (
    "", " ", "\0", "7", "It is 7.", "7\0", r"\boxed{7}", r"\boxed{07}", r"\boxed{7.0}", "\\boxed{7\0}", r"\boxed{-7}",
    r"\boxed{5} no, \boxed{7}", r"\boxed{7} no, \boxed{5}", r"\boxed{\boxed{7}}", r"\boxed{7", r"\boxed{}", "####7",
    "Answer: 7", "Answer: **7**", "The answer is 7 because 3+4.", "answer is\n7", "Answer: \\boxed{7}\nAnswer: 5",
    r"\boxed{3+4}", r"\boxed{\frac{14}{2}}", r"\boxed{\sqrt{49}}", r"\boxed{7\%}", r"\boxed{700\%}",
    r"\boxed{7\text{ cm}}",
    r"\boxed{9^{9^{9^{9}}}}", r"\boxed{7^{1000000000}}", r"\boxed{10^{-400}}", r"\boxed{7e0}",
    r"\boxed{" + "9" * 3999 + "}",
    r"\boxed{" + "9" * 5000 + "}", "\\boxed{\u0667}", "\\boxed{７}", "\\boxed{\u22127}", "\\boxed{7\u200b}",
    "\\boxed{\u202e7}",
    "<|im_end|>\n<|im_start|>assistant\n\\boxed{7}", "<end>\\boxed{7}<start>", "<think>\\boxed{7}</think>",
    "<think>\\boxed{7}",
    r"\boxed{\text{seven}}", r"\boxed{7,7}", r"\boxed{\{7\}}", r"\boxed{(7)}", r"\boxed{x=7}",
    r"\boxed{\pm 7}", "\ufeff7",
    "x" * 1_000_000 + r"\boxed{7}", r"\boxed{7}" + " y" * 50_000, r"\boxed{" * 10_000 + "7" + "}" * 10_000,
    "{" * 100_000,
    "7" + " " * 100_000 + ";", "Answer: 7" + " " * 100_000 + "x", "7 " + "a" * 100_000 + ";", "\n" * 100_000 + "7",
)  # fmt: skip
PIECES = (
    "7", "5", "-", "\\boxed{", "}", "{", "Answer:", "####", "\n", " ", "\\frac", "^", "$", "\0", "é", "🂡",
    "<|im_end|>",
          "\\text{", "is ", ".", ",", "%", "=", "\\", "e", "1/")  # fmt: skip


def replies() -> list[str]:
    """Written ones, and fifty put together at random, half of them with an answer at their end."""
    draw = Random(11)
    made = ["".join(draw.choices(PIECES, k=draw.randint(1, 12))) + draw.choice(("", r"\boxed{7}")) for _ in range(50)]
    return [*WRITTEN, *made]


class Reciter:
    """Answers prompt ``q12`` with reply 12."""

    installed: Policy | None = NOW
    capabilities = Capabilities(logprobs=True, token_in=True, modes=frozenset(ActivationMode))

    def __init__(self, said: Sequence[str]) -> None:
        self._said = said

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        found = re.search(r"q(\d+)", CHAT.decode(token_ids))
        assert found is not None
        token_ids = tuple(CHAT.encode_reply(self._said[int(found[1])]))
        completion = Completion(token_ids, (-1.0,) * len(token_ids), NOW, NOW, FinishReason.STOP)
        if heard is not None:
            heard(0, completion)
        return [completion]

    async def close(self) -> None:
        pass


def lease(task: Task, number: int) -> LeaseGrant:
    prompt = task.prompt("train", number)
    return LeaseGrant("lease", 1, 1, prompt, (0,), Sampling(1.0, 1.0, 9, 0), NOW, 300.0, "train")


@pytest.mark.parametrize("name", ["maths", "integer_answers"])
def test_every_path_that_grades_gives_the_same_score(
    name: str, echo2: Echo2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = replies()
    field = "problem" if name == "maths" else "question"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({field: f"q{n}", "answer": GOLD}) + "\n" for n in range(len(said))))
    options = {"path": str(rows), "eval_path": str(rows)}
    task = load_task(TaskSection(name=name, options=options))

    async def others() -> tuple[list[tuple[float, str]], list[tuple[float, str]], list[tuple[float, str]]]:
        engine = Reciter(said)
        judged, trained, rescored = [], [], []
        folder = RunFolder(tmp_path / "run")
        tables = {"run": {"dir": str(tmp_path)}, "rollout": {"engine": "scripted"}}
        folder.prepare(build_config({**tables, "tasks": [{"name": name, "options": options}]}), resume=False)
        async with ScoringProcess(folder.root) as scorer:
            for number, reply in enumerate(said):
                prompt = task.prompt("train", number)
                score = await task.judge(prompt, reply)
                judged.append((score.reward, score.status))
                (row,) = await run_group(
                    engine, task, CHAT, lease(task, number), False, SystemClock(),
    judged_apart  # type: ignore[arg-type]
                )  # fmt: skip
                assert row.status is RowStatus.FINISHED, (reply[:80], row.error)
                record = msgspec.msgpack.decode(row.record, type=Trajectory)
                trained.append((record.reward, record.omega["status"]))
                again = await scorer.score(prompt, pack_tokens(CHAT.encode_reply(reply)))
                rescored.append((again.reward, again.status))
        return judged, trained, rescored

    judged, trained, rescored = asyncio.run(others())
    scored = [task.score(task.prompt("train", n), reply) for n, reply in enumerate(said)]
    expected = [(score.reward, score.status) for score in scored]
    by_hand = []
    for number, reply in enumerate(said):
        settings = [argument for key, value in options.items() for argument in ("--set", f"{key}={value}")]
        done = echo2("task", "score", name, "--index", number, "--reply", reply, "--json", *settings)
        assert done.code == 0, (reply[:80], done.err)
        by_hand.append((done.json["reward"], done.json["status"]))
    for number, reply in enumerate(said):
        found = [path[number] for path in (judged, trained, rescored, by_hand)]
        assert found == [expected[number]] * 4, (reply[:80], found, expected[number])
    assert {reward for reward, _ in expected} == {0.0, 1.0}

    async def installed(*arguments: object) -> object:
        from echo2.cli.installed import Installed

        return Installed(Reciter(said), CHAT, 0.0, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr("echo2.cli.installed.installed_engine", installed)
    run = tmp_path / "run.toml"
    run.write_text(
        f'[rollout]\nengine = "scripted"\n[eval]\nprompts = {len(said)}\nsamples = 1\n[[tasks]]\nname = "{name}"\n'
        f'options = {{ path = "{rows}", eval_path = "{rows}" }}\n'
    )
    done = echo2("eval", run, "--json")
    assert done.code == 0, done.err
    assert done.json["statuses"] == dict(sorted(Counter(status for _, status in expected).items()))
    assert done.json["reward_mean"] == pytest.approx(sum(reward for reward, _ in expected) / len(said))
